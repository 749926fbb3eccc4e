"""Which tasks of a plan are done: told by commit records in storage, and by nothing else.

    plan + listing of names and sizes -> tasks that may be done -> their commit records -> results

A remote listing costs a request for each 1,000 files, 16 at a time; records are read only of tasks
that are listed. So a plan of 100,000 tasks is looked over by some hundred requests while nothing
is done, and one more for each finished task where its record is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.container import tokens_suffix
from olm_data.dataset.docs import DOCS
from olm_data.dataset.plan import Plan, shard_name
from olm_data.dataset.record import RECORD, ShardRecord
from olm_data.dataset.shard import ENDS
from olm_data.storage.json_file import read_json
from olm_data.storage.store import Store
from olm_data.threads import in_order

"""Remote stores answer slowly, but many at a time."""


@dataclass(frozen=True)
class TaskResult:
    """The commit records of a task, each with its file's sha256; no validation if not asked."""

    train: tuple[ShardRecord, str]
    validation: tuple[ShardRecord, str] | None

    @property
    def splits(self) -> list[tuple[ShardRecord, str]]:
        """The records of the splits there are: train, then validation."""
        return [self.train] if self.validation is None else [self.train, self.validation]


def finished_tasks(
    plan: Plan, splits: Sequence[Store], tasks: Sequence[int] | None = None
) -> dict[int, TaskResult]:
    """Return the results of those of `tasks` (all by default) that some process has committed."""
    sizes = [shard_files(store, plan) for store in splits]
    wanted = range(len(plan.tasks)) if tasks is None else tasks
    there = [task for task in wanted if plan.shard(task) + RECORD in sizes[0]]
    found = in_order(lambda task: committed(plan, task, splits, sizes), there)
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


def committed(
    plan: Plan,
    task: int,
    splits: Sequence[Store],
    sizes: Sequence[Mapping[str, int]] | None = None,
) -> TaskResult | None:
    """Return the records of a task that some process finished, or None if it must be (re)done.

    A task is finished when each split has a commit record of this plan whose files have the
    recorded sizes; digests are `verify`'s business.

    Args:
        sizes: of the files of each split, where they were listed; else each file is asked for.
    """
    found = []
    for number, store in enumerate(splits):
        known = None if sizes is None else sizes[number]
        found.append(_committed_split(plan, plan.shard(task), store, known))
        if found[-1] is None:
            return None
    train = found[0]
    assert train is not None
    return TaskResult(train, found[1] if len(found) == 2 else None)


def _committed_split(
    plan: Plan, name: str, store: Store, sizes: Mapping[str, int] | None
) -> tuple[ShardRecord, str] | None:
    try:
        data = read_json(store, name + RECORD)
        record = ShardRecord.parse(data)
    except (FileNotFoundError, NotADirectoryError, MalformedJson):
        return None
    if record.name != name or record.plan != plan.digest:
        return None
    for kind in (tokens_suffix(plan.settings.container), ENDS, DOCS) if record.tokens else ():
        info = record.files.get(kind.split(".")[1])
        size = store.size(name + kind) if sizes is None else sizes.get(name + kind)
        if info is None or size != info.bytes:
            return None
    return record, hashlib.sha256(data).hexdigest()
