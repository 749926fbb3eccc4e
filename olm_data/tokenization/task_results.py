"""What tasks have written: told by commit records in storage, and by nothing else.

    plan + listing of names and sizes -> tasks that may be done -> their commit records -> results
    finished dataset -> commit records of all its plans -> an account for each input

A remote listing costs a request for each 1,000 files, 16 at a time; records are read only of tasks
that are listed. So a plan of 100,000 tasks is looked over by some hundred requests while nothing
is done, and one more for each finished task where its record is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.account import InputAccount, totals_by_input
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.docs import DOCS
from olm_data.dataset.manifest import VALIDATION
from olm_data.dataset.plan import Plan, read_plans, shard_name
from olm_data.dataset.record import RECORD, ShardRecord, tokens_suffix
from olm_data.dataset.shard import ENDS, LABELS
from olm_data.errors import InputError, OlmError, ValidationError, typed
from olm_data.path_kinds import kind_of, nearest, wrong_kind
from olm_data.storage.store import Store, read_json
from olm_data.threads import READERS, in_order


@dataclass(frozen=True)
class TaskResult:
    """The commit records of a task, each with its file's sha256: train, then validation if any."""

    splits: tuple[tuple[ShardRecord, str], ...]

    @property
    def accounts(self) -> list[InputAccount]:
        """What became of the records of each input that the task read."""
        return self.splits[0][0].accounts


def split_stores(store: Store, plan: Plan) -> list[Store]:
    """Return the stores of the splits: train, and validation if something is held out."""
    return [store, store.child(VALIDATION)] if plan.settings.holdout_below else [store]


def finished_tasks(plan: Plan, splits: Sequence[Store]) -> dict[int, TaskResult]:
    """Return the results of the tasks that some process has committed."""
    sizes = [shard_files(store, plan) for store in splits]
    there = [task for task, name in enumerate(plan.shards) if name + RECORD in sizes[0]]
    found = in_order(lambda task: finished_task(plan, task, splits, sizes), there)
    return {task: result for task, result in zip(there, found, strict=True) if result}


def shard_files(store: Store, plan: Plan) -> dict[str, int]:
    """Return name -> size of the files of the plan's shards that a split has."""
    if not store.remote:
        return store.sizes(shard_name(0)[:-5])
    prefixes = list(dict.fromkeys(shard[:-3] for shard in plan.shards))
    found: dict[str, int] = {}
    for part in in_order(store.sizes, prefixes):
        found |= part
    return found


def finished_task(
    plan: Plan,
    task: int,
    splits: Sequence[Store],
    sizes: Sequence[Mapping[str, int]] | None = None,
) -> TaskResult | None:
    """Return the result of a task that some process finished, or None if it must be (re)done.

    A task is finished when each split has a commit record of this plan whose files have the
    recorded sizes; digests are `verify`'s business.

    Args:
        sizes: of the files of each split, where they were listed; else each file is asked for.
    """
    found = []
    for number, store in enumerate(splits):
        size = store.size if sizes is None else sizes[number].get
        record = _committed(plan, plan.shard(task), store, size)
        if record is None:
            return None
        found.append(record)
    return TaskResult(tuple(found))


def _committed(
    plan: Plan, name: str, store: Store, size: Callable[[str], int | None]
) -> tuple[ShardRecord, str] | None:
    try:
        data = read_json(store, name + RECORD)
        record = ShardRecord.parse(data)
    except (FileNotFoundError, NotADirectoryError, MalformedJson):
        return None
    if record.name != name or record.plan != plan.digest:
        return None
    labels = () if record.runs is msgspec.UNSET else (LABELS,)
    kinds = (tokens_suffix(plan.settings.container), ENDS, DOCS, *labels)
    for kind in kinds if record.tokens else ():
        info = record.files.get(kind.split(".")[1])
        if info is None or size(name + kind) != info.bytes:
            return None
    return record, hashlib.sha256(data).hexdigest()


def no_run(output: str) -> OlmError:
    """Return the error that there is no run at `output`."""
    found = kind_of(output)
    if found not in (None, "dataset", "folder", "empty folder"):
        return wrong_kind(output, str(found), "unfinished dataset")
    return InputError(
        "no run has begun here",
        where=output,
        fix=nearest(output, f"olm-data tokenize ... --output {typed(output)} begins one"),
    )


def damaged_run(store: Store, name: str, why: str) -> ValidationError:
    """Return the error that a file of a run is not what it should be."""
    return ValidationError(
        "a file of the run is damaged",
        where=store.url(name),
        why=why,
        fix="run the same tokenize command again, or delete this output",
    )


def accounts_of(dataset: Dataset) -> dict[int, InputAccount]:
    """Return what became of the records of each input of a dataset, as `totals_by_input` sums it.

    A task that made no tokens has a record and no shard, so the plans say which records there are.
    A validation split keeps no accounts: {}.

    Raises:
        ValidationError: a plan or a commit record is missing or damaged.
    """
    if dataset.manifest.split != "train":
        return {}
    plans = read_plans(dataset.store, dataset.manifest)
    names = [name for plan in plans for name in plan.shards]

    def read(name: str) -> list[InputAccount]:
        try:
            return ShardRecord.parse(read_json(dataset.store, name + RECORD)).accounts
        except (FileNotFoundError, MalformedJson) as error:
            raise ValidationError(
                "a commit record is missing or damaged",
                where=dataset.store.url(name + RECORD),
                fix=f"olm-data verify {dataset.store.root}",
            ) from error

    found = in_order(read, names, ahead=2 * READERS)
    return totals_by_input(account for accounts in found for account in accounts)
