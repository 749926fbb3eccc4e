"""Where the records of each input went, read back from the commit records of a dataset."""

from __future__ import annotations

from collections import Counter

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.account import InputAccount
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.history import read_plans
from olm_data.dataset.record import RECORD, ShardRecord
from olm_data.errors import ValidationError
from olm_data.storage.json_file import read_json
from olm_data.threads import READERS, in_order


def drops_of_inputs(dataset: Dataset) -> tuple[dict[int, Counter[str]], Counter[int]]:
    """Return drops by input and reason, and the documents of each input in the other split.

    A task that made no tokens has a record and no shard, so the plans say which records there are.
    A validation split keeps no accounts: both are empty.

    Raises:
        ValidationError: a plan or a commit record is missing or damaged.
    """
    names: list[str] = []
    if dataset.manifest.split == "train":
        for plan in read_plans(dataset.store, dataset.manifest):
            names += plan.shards
    dropped: dict[int, Counter[str]] = {}
    held_out: Counter[int] = Counter()

    def read(name: str) -> list[InputAccount]:
        try:
            return ShardRecord.parse(read_json(dataset.store, name + RECORD)).accounts
        except (FileNotFoundError, MalformedJson) as error:
            raise ValidationError(
                "a commit record is missing or damaged",
                where=dataset.store.url(name + RECORD),
                fix=f"olm-data verify {dataset.store.root}",
            ) from error

    for accounts in in_order(read, names, ahead=2 * READERS):
        for account in accounts:
            dropped.setdefault(account.input, Counter()).update(account.dropped)
            held_out[account.input] += account.held_out
    return dropped, held_out
