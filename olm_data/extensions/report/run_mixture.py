"""What a run has drawn of each source so far, and what its stages asked for.

lock, rows passed, rows skipped -> Share of each source
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec
import numpy as np

from olm_data.errors import printable
from olm_data.mixture.lock import Lock
from olm_data.order.schedule import Schedule
from olm_data.order.skip import Range
from olm_data.run_log.log import Start

MOST_SKIPPED = 1 << 20
"""Rows left out whose sources are looked up."""
MOST_SOURCES = 24


class Share(msgspec.Struct, frozen=True):
    """A source: tokens drawn so far, and the shares of the whole that were drawn and asked for."""

    source: str
    tokens: int
    drawn: float
    asked: float


def shares(lock: Lock, schedule: Schedule, rows: int, skipped: Sequence[Range]) -> list[Share]:
    """Return the shares of the sources drawn most, after the first `rows` rows of the run.

    Args:
        skipped: ranges of them that were left out, sorted and merged.
    """
    rows = min(rows, schedule.total_rows)
    drawn = schedule.drawn_before(rows).astype(np.int64)
    gone = [(a, min(b, rows)) for a, b in skipped if a < rows]
    if sum(b - a for a, b in gone) <= MOST_SKIPPED:
        for first, end in gone:
            places = schedule.locate(np.arange(first, end))
            drawn = drawn - np.bincount(places.source, minlength=len(drawn))
    asked, left = [Fraction(0)] * len(drawn), rows
    for stage in lock.stages:
        here = min(left, stage.rows)
        left -= here
        asked = [a + here * Fraction(w) for a, w in zip(asked, stage.wanted, strict=True)]
    total, wanted = max(1, int(drawn.sum())), sum(asked) or 1
    order = sorted(range(len(drawn)), key=lambda i: (-int(drawn[i]), i))[:MOST_SOURCES]
    return [
        Share(
            source=printable(lock.sources[i].name),
            tokens=int(drawn[i]) * lock.sequence_length,
            drawn=int(drawn[i]) / total,
            asked=float(asked[i] / wanted),
        )
        for i in order
    ]


def total_steps(starts: Sequence[Start], lock: Lock) -> int:
    """Return how many steps the last start is to have, by its sizes and `max_duration`."""
    if not starts:
        return 0
    sizes = starts[-1].batch_sizes
    skipped = sum(stop - first for first, stop in starts[-1].skip)
    total = sizes.per(lock.sequence_length).count(lock.total_rows - skipped)
    trainer = starts[-1].config.get("trainer")
    limit = trainer.get("max_duration") if isinstance(trainer, dict) else None
    if isinstance(limit, dict) and isinstance(limit.get("value"), int):
        if limit.get("unit") == "steps":
            return min(total, int(limit["value"]))
        if limit.get("unit") == "tokens":
            return min(total, sizes.steps_to(int(limit["value"])))
    return total
