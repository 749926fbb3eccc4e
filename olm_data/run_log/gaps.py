"""What the log of a run lacks: lines of steps that are missing or stand twice, a missing file.

    numbers of the logged steps, steps that starts went on from -> remarks

A log begins after the earliest step that a start went on from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from olm_data.order.skip import Range, merge_ranges

MOST_SHOWN = 3


def incomplete(
    metrics: Path,
    steps: Sequence[int],
    log: Path,
    begun: Sequence[int],
    end: int | None = None,
    *,
    own: bool = True,
) -> list[str]:
    """Return remarks on what should be in a log and is not, or is there twice.

    Args:
        metrics: `metrics.jsonl`.
        steps: numbers of the logged ones, in its order.
        log: `starts.jsonl`.
        begun: the step of the checkpoint that each start went on from.
        end: the last step there should be; None: the last one there is.
        own: whether the steps up to `end` were trained in this folder.
    """
    if end and own and not steps and not begun:
        return [
            f"{metrics} and {log.name} are missing or empty: what was trained up to step {end:,}, "
            "and rows that were left out, are not known"
        ]
    notes = []
    if steps and not begun:
        notes.append(
            f"{log} is missing or empty: earlier starts, and rows that they left out, are not known"
        )
    if begun and not metrics.exists():
        notes.append(f"{metrics} is missing: the steps before are not in the log")
    first = min(begun, default=steps[0] - 1 if steps else 0) + 1
    missing, repeated, due = [], [], first
    for step in steps:
        if step < due:
            repeated.append((step, step + 1))
        else:
            missing += [(due, step)] * (due < step)
            due = step + 1
    if metrics.exists() and end is not None and due <= end:
        missing.append((due, end + 1))
    notes += [f"{metrics} has no line of {_in_words(missing)}"] if missing else []
    notes += [f"{metrics} has more than one line of {_in_words(repeated)}"] if repeated else []
    return notes


def _in_words(ranges: Iterable[Range]) -> str:
    merged = merge_ranges(ranges)
    shown = [f"{a:,} to {b - 1:,}" if b - a > 1 else f"{a:,}" for a, b in merged[:MOST_SHOWN]]
    rest = len(merged) - MOST_SHOWN
    more = f" and {rest:,} more ranges" if rest > 0 else ""
    return f"step{'s' if len(shown) > 1 or merged[0][1] - merged[0][0] > 1 else ''} " + (
        ", ".join(shown) + more
    )
