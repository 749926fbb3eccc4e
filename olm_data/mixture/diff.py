"""What differs between two locks, and up to which row they train on the same.

    Lock, Lock --diff--> Difference(same_rows, lines)

The rows before the first difference are found from the slot tables: two periodic sequences that
agree over the sum of their periods agree for ever (N. Fine and H. Wilf, "Uniqueness theorems for
periodic functions", 1965), so nothing is walked that has the size of the run. Never: read data.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from olm_data.counts import counted
from olm_data.mixture.lock import Lock
from olm_data.mixture.lock_format import LockSource, ManifestStage, manifest_stages
from olm_data.order.base import Order


@dataclass(frozen=True)
class Difference:
    """The first `same_rows` rows of both runs are the same; `lines` say what differs."""

    same_rows: int
    old_rows: int
    new_rows: int
    lines: tuple[str, ...]

    @property
    def extends(self) -> bool:
        """Whether the new run goes on where the old one ends."""
        return self.same_rows == self.old_rows


def diff(old: Lock, new: Lock) -> Difference:
    """Compare two locks."""
    lines = [
        f"{what}: {_shown(was)} -> {_shown(now)}"
        for what, was, now in (
            ("seed", old.seed, new.seed),
            ("sequence_length", old.sequence_length, new.sequence_length),
            ("packing", old.packing.name, new.packing.name),
            ("tokenizer", old.tokenizer.sha256[:12], new.tokenizer.sha256[:12]),
            ("order", old.order, new.order),
        )
        if was != now
    ]
    lines += _source_lines(old, new) + _stage_lines(old, new)
    return Difference(same_rows(old, new), old.total_rows, new.total_rows, tuple(lines))


def same_rows(old: Lock, new: Lock) -> int:
    """Return how many first rows of two runs are the same tokens in the same order and length."""
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


def _keys(lock: Lock) -> list[bytes]:
    """Return what the rows of each source depend on, for each source."""
    keys = []
    for index, source in enumerate(lock.sources):
        order = lock.order.for_source(index)
        drawn_on = msgspec.structs.replace(source, max_epochs="")
        keys.append(msgspec.json.encode([drawn_on, order.name, order]))
    return keys


def _source_lines(old: Lock, new: Lock) -> list[str]:
    was, now = ({source.name: source for source in lock.sources} for lock in (old, new))
    lines = [f"source {name}: removed" for name in was if name not in now]
    lines += [
        f"source {name}: added, {counted(now[name].rows, 'row')}" for name in now if name not in was
    ]
    for name in was:
        if name in now:
            lines += _field_lines(f"source {name}", was[name], now[name])
    return lines


def _field_lines(what: str, was: LockSource, now: LockSource) -> list[str]:
    pairs = ((key, getattr(was, key), getattr(now, key)) for key in was.__struct_fields__)
    return [f"{what}: {key} {_shown(a)} -> {_shown(b)}" for key, a, b in pairs if a != b]


def _stage_lines(old: Lock, new: Lock) -> list[str]:
    was, now = ({stage.name: stage for stage in manifest_stages(lock)} for lock in (old, new))
    lines = [f"stage {name}: removed" for name in was if name not in now]
    lines += [
        f"stage {name}: added, {counted(now[name].rows, 'row')}" for name in now if name not in was
    ]
    kept = [name for name in was if name in now]
    if kept != [name for name in now if name in was]:
        lines.append("stages: in another order")
    for name in kept:
        for key in ("tokens", "rows"):
            if getattr(was[name], key) != getattr(now[name], key):
                lines.append(
                    f"stage {name}: {key} {getattr(was[name], key):,} -> "
                    f"{getattr(now[name], key):,}"
                )
        a, b = was[name].parts[0].sequence_length, now[name].parts[0].sequence_length
        if a != b:
            lines.append(
                f"stage {name}: sequence_length {a or old.sequence_length:,} -> "
                f"{b or new.sequence_length:,}"
            )
        ours, theirs = _drawn(old, was[name]), _drawn(new, now[name])
        for source in sorted(ours | theirs):
            (share, rows), (other, more) = (d.get(source, (Fraction(0), 0)) for d in (ours, theirs))
            if (share, rows) != (other, more):
                lines.append(
                    f"stage {name}: {source} {float(share):.4%} -> {float(other):.4%} wanted, "
                    f"{rows:,} -> {counted(more, 'row')}"
                )
    return lines


def _drawn(lock: Lock, stage: ManifestStage) -> dict[str, tuple[Fraction, int]]:
    """Return (share wanted, rows) of each source that the stage wants."""
    names = [source.name for source in lock.sources]
    numbers = zip(stage.wanted, stage.rows_by_source, strict=True)
    return {n: pair for n, pair in zip(names, numbers, strict=True) if pair[0]}


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Order):
        fields = msgspec.json.encode(value).decode()
        return value.name if fields == "{}" else f"{value.name} {fields}"
    if isinstance(value, msgspec.Struct):
        return msgspec.json.encode(value).decode()
    return value[:12] if isinstance(value, str) else "none" if value is None else str(value)
