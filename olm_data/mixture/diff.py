"""What differs between two locks, and up to which row they train on the same.

    Lock, Lock --diff--> Difference
    Lock, what is other behind its first rows --continued--> Lock that names it in `extends`

The rows before the first difference are found from the slot tables: two periodic sequences that
agree over the sum of their periods agree for ever (N. Fine and H. Wilf, "Uniqueness theorems for
periodic functions", 1965), so nothing is walked that has the size of the run.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from olm_data.counts import counted
from olm_data.mixture.lock import Lock
from olm_data.mixture.lock_format import OlderLock
from olm_data.order.base import Order
from olm_data.order.schedule import sample_rows, schedule_sha256


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between two runs.

    Attributes:
        old, new: digests of their locks.
        same_rows: so many first rows of both are the same.
        differences: what differs in the locks, in words.
    """

    old: str
    new: str
    old_rows: int
    new_rows: int
    same_rows: int
    differences: list[str]


def diff(old: Lock, new: Lock) -> Difference:
    """Compare two locks."""
    runs, sources, stages = zip(*map(_described, (old, new)), strict=True)
    return Difference(
        old=old.digest,
        new=new.digest,
        old_rows=old.total_rows,
        new_rows=new.total_rows,
        same_rows=same_rows(old, new),
        differences=[
            *_changes("", *runs),
            *_named_changes("source", *sources),
            *_named_changes("stage", *stages),
        ],
    )


def same_rows(old: Lock, new: Lock) -> int:
    """Return how many first rows of two runs are the same tokens in the same order and length."""
    for one, other in ((old, new), (new, old)):
        if not one.complete and one.digest != other.digest:  # only what follows tells
            return next((o.rows for o in other.extends if o.digest == one.digest), 0)
    if any(
        getattr(old, key) != getattr(new, key)
        for key in ("seed", "sequence_length", "packing", "tokenizer")
    ):
        return 0
    common = {key: index for index, key in enumerate(set(_keys(old)) & set(_keys(new)))}
    ours = np.array([common.get(key, -1) for key in _keys(old)])
    theirs = np.array([common.get(key, -2) for key in _keys(new)])
    schedules = old.schedule(), new.schedule()
    ends = [np.cumsum([0, *(stage.rows for stage in lock.stages)]) for lock in (old, new)]
    bounds = np.unique(np.concatenate(ends))
    for start, end in pairwise(bounds[bounds <= min(int(e[-1]) for e in ends)].tolist()):
        at = [int(np.searchsorted(e, start, side="right")) - 1 for e in ends]
        a, b = old.stages[at[0]], new.stages[at[1]]
        if a.sequence_length != b.sequence_length:
            return int(start)
        length = min(end - start, a.block + b.block)
        found = []
        for ids, schedule, stage, e in zip((ours, theirs), schedules, at, ends, strict=True):
            table = schedule.table(stage)
            slots = (start - int(e[stage]) + np.arange(length)) % len(table.source)
            found.append(ids[table.source[slots]])
        if (differs := np.flatnonzero(found[0] != found[1])).size:
            return int(start + differs[0])
    return min(old.total_rows, new.total_rows)


def continued(lock: Lock, rows: int, **changes: Any) -> Lock:
    """Return a lock with other values behind its first `rows` rows, which stay what they are.

    `extends` of it names `lock` and the older ones, each with the rows that all of them share.
    """
    own = OlderLock(digest=lock.digest, rows=rows, order_sha256="")
    shared = [
        msgspec.structs.replace(
            older, rows=end, order_sha256=schedule_sha256(lock.schedule(), sample_rows(end))
        )
        for older in (*lock.extends, own)
        for end in [min(older.rows, rows)]
    ]
    new = msgspec.structs.replace(lock, **changes, extends=tuple(shared), digest="")
    new = msgspec.structs.replace(new, digest=new.compute_digest())
    assert same_rows(lock, new) >= rows
    for older in shared:
        order = schedule_sha256(new.schedule(), sample_rows(older.rows))
        assert order == older.order_sha256
    return new


def _keys(lock: Lock) -> list[bytes]:
    """Return what the rows of each source depend on, for each source."""
    keys = []
    for index, source in enumerate(lock.sources):
        order = lock.order.for_source(index)
        drawn_on = msgspec.structs.replace(source, max_epochs="")
        keys.append(msgspec.json.encode([drawn_on, order.name, order], order="deterministic"))
    return keys


Fields = dict[str, Any]


def _described(lock: Lock) -> tuple[Fields, dict[str, Fields], dict[str, Fields]]:
    """Return the fields of the run, and those of each source and stage, that are compared."""
    run = {key: getattr(lock, key) for key in ("seed", "sequence_length", "order")}
    run |= {"packing": lock.packing.name, "tokenizer": lock.tokenizer.sha256}
    names = [source.name for source in lock.sources]
    stages = {}
    for stage in lock.manifest_stages:
        length = stage.parts[0].sequence_length or lock.sequence_length
        fields = {"tokens": stage.tokens, "rows": stage.rows, "sequence_length": length}
        drawn = zip(names, stage.wanted, stage.rows_by_source, strict=True)
        shares = {
            name: f"{float(share):.4%} wanted, {counted(rows, 'row')}"
            for name, share, rows in drawn
            if share
        }
        stages[stage.name] = fields | shares
    return run, {source.name: msgspec.structs.asdict(source) for source in lock.sources}, stages


def _changes(what: str, was: Fields, now: Fields) -> list[str]:
    return [
        f"{what}{key} {_shown(was.get(key))} -> {_shown(now.get(key))}"
        for key in was | now
        if was.get(key) != now.get(key)
    ]


def _named_changes(what: str, was: dict[str, Fields], now: dict[str, Fields]) -> list[str]:
    lines = [f"{what} {name}: removed" for name in was if name not in now]
    lines += [
        f"{what} {name}: added, {counted(now[name]['rows'], 'row')}"
        for name in now
        if name not in was
    ]
    kept = [name for name in was if name in now]
    if what == "stage" and kept != [name for name in now if name in was]:
        lines.append("stages: in another order")
    return lines + [
        line for name in kept for line in _changes(f"{what} {name}: ", was[name], now[name])
    ]


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Order):
        fields = msgspec.json.encode(value).decode()
        return value.name if fields == "{}" else f"{value.name} {fields}"
    if isinstance(value, msgspec.Struct):
        return msgspec.json.encode(value).decode()
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:12]  # a digest
    return "none" if value is None else str(value)
