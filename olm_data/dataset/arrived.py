"""The first shards of a dataset whose later ones are still being written, as a dataset of its own.

    plan.json + commit records of the first shards --read_group--> Group: a manifest of these alone
    plan.json + manifest.json, which comes last    --read_group--> Group: the dataset, `ended`

Groups of shards follow the plan's order and the numbers of shards alone: 1, 1, 1, 1, 2, 3, 4, ...
shards, each half as many as all before it. Who asks, and when, changes nothing of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

import numpy as np

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.account import InputAccount, dropped_of, input_digest
from olm_data.dataset.manifest import (
    MANIFEST,
    PLAN,
    InputInfo,
    Manifest,
    build_manifest,
    read_manifest,
)
from olm_data.dataset.plan import Plan, PlannedInput
from olm_data.dataset.record import RECORD, ShardRecord
from olm_data.dataset.tokenizer import TokenizerInfo
from olm_data.dataset.tools import Tools
from olm_data.errors import ValidationError
from olm_data.storage.store import Store, read_json
from olm_data.threads import in_order


@dataclass(frozen=True)
class Group:
    """A dataset up to the end of a group of its shards.

    Attributes:
        number: of the group, from 1.
        manifest: of all shards up to there.
        ended: whether it is the whole dataset.
    """

    number: int
    manifest: Manifest
    ended: bool

    def token_ends(self) -> list[int]:
        """Return the tokens up to the end of each group."""
        tokens = {int(s.name.removeprefix("shard-")): s.tokens for s in self.manifest.shards}
        borders = map(border, range(1, self.number))
        ends = [sum(n for shard, n in tokens.items() if shard < end) for end in borders]
        return [*ends, self.manifest.totals.tokens]


def border(group: int) -> int:
    """Return the number of shards up to the end of a group, the first of which is 1."""
    *_, shards = accumulate(repeat(1, group), lambda shards, _: shards + max(1, shards // 2))
    return shards


def read_group(store: Store, number: int) -> Group | None:
    """Return a dataset up to the end of a group; None where that is still to be written.

    A finished dataset without the plan that made it is one group.

    Raises:
        ValidationError: its plan or a commit record is damaged.
    """
    try:
        plan = Plan.read(store, PLAN)
    except FileNotFoundError:
        return Group(1, read_manifest(store), True) if store.exists(MANIFEST) else None
    except MalformedJson as error:
        raise ValidationError("the plan is damaged", where=store.url(PLAN)) from error
    names = plan.shards[: border(number)]
    if number > 1 and len(names) == len(plan.shards):
        return Group(number, read_manifest(store), True) if store.exists(MANIFEST) else None
    if not store.exists(names[-1] + RECORD):
        return None
    records = []
    for found in in_order(lambda name: _committed(store, plan, name), names):
        if found is None:
            return None
        records.append(found)
    return Group(number, _manifest(plan, records), False)


def _committed(store: Store, plan: Plan, name: str) -> tuple[ShardRecord, str] | None:
    try:
        data = read_json(store, name + RECORD)
        record = ShardRecord.parse(data)
    except FileNotFoundError:
        return None
    except MalformedJson as error:
        raise ValidationError(
            "a shard's commit record is damaged",
            where=store.url(name + RECORD),
            fix="run the same tokenize command again: it writes the shard anew",
        ) from error
    return (record, hashlib.sha256(data).hexdigest()) if record.plan == plan.digest else None


def _manifest(plan: Plan, records: Sequence[tuple[ShardRecord, str]]) -> Manifest:
    accounts = [account for record, _ in records for account in record.accounts]
    inputs, settings = input_totals(plan.inputs, accounts), plan.settings
    return build_manifest(
        tokenizer=TokenizerInfo(
            settings.tokenizer,
            settings.tokenizer_probe,
            settings.vocab_size,
            settings.bos,
            settings.eos,
            settings.special,
        ),
        dtype=np.dtype(np.uint16 if settings.vocab_size <= 65536 else np.uint32),
        options=settings.options("train"),
        plan=plan.digest,
        inputs=inputs,
        records=records,
        dropped=dict(dropped_of(accounts)),
        documents_in=sum(item.documents for item in inputs),
        tools=Tools(),
        container=settings.container,
    )


def input_totals(
    inputs: Sequence[PlannedInput | InputInfo], accounts: Sequence[InputAccount]
) -> list[InputInfo]:
    """Sum the accounts of tasks by input, of a plan or of a manifest."""
    documents: Counter[int] = Counter()
    parts: dict[int, list[str]] = {}
    for account in accounts:
        documents[account.input] += account.documents_in
        parts.setdefault(account.input, []).append(account.sha256)
    return [
        InputInfo(
            path=item.path,
            bytes=item.bytes,
            position=item.position,
            documents=documents[index],
            sha256=input_digest(parts.get(index, [])),
        )
        for index, item in enumerate(inputs)
    ]
