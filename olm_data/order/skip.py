"""The rows of a schedule that are trained on: all but the skipped ranges. Pure.

Rows are counted twice: as a *global row* of the schedule, and as a *kept index*, its position among
the rows that are not skipped. Steps are cut from kept indices; the state of a run is a global row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from olm_data.errors import UsageError

Range = tuple[int, int]


def merge_ranges(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """Return half-open ranges [a, b) sorted, without overlaps or neighbours that touch.

    Raises:
        UsageError: a range is not two integers 0 <= a < b.
    """
    merged: list[Range] = []
    checked = [_check(item) for item in ranges]
    for a, b in sorted(checked):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return tuple(merged)


def clip_ranges(ranges: Iterable[Range], start: int, stop: int) -> tuple[Range, ...]:
    """Return the parts of `ranges` inside [start, stop)."""
    clipped = ((max(a, start), min(b, stop)) for a, b in ranges)
    return tuple((a, b) for a, b in clipped if a < b)


class KeptRows:
    """The rows 0 .. total_rows - 1 without the skipped ones.

    Args:
        total_rows: rows of the schedule.
        skip: half-open ranges of global rows.

    Attributes:
        skip: the ranges, sorted and merged.
        count: kept rows.

    Raises:
        UsageError: a range is malformed or reaches beyond the schedule.
    """

    def __init__(self, total_rows: int, skip: Iterable[Sequence[int]] = ()) -> None:
        self.skip = merge_ranges(skip)
        if self.skip and self.skip[-1][1] > total_rows:
            raise UsageError(
                f"skip: [{self.skip[-1][0]}, {self.skip[-1][1]}] reaches beyond the schedule of "
                f"{total_rows:,} rows",
                fix="give ranges of global row numbers [first, one past the last]",
            )
        bounds = np.array(self.skip, dtype=np.int64).reshape(-1, 2)
        self._starts, self._ends = bounds[:, 0], bounds[:, 1]
        self._skipped_before = np.append(0, np.cumsum(bounds[:, 1] - bounds[:, 0]))
        # kept index at which each skipped range stands
        self._kept_at = self._starts - self._skipped_before[:-1]
        self.count = total_rows - int(self._skipped_before[-1])

    def rows(self, kept: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the global rows int64 [m] of kept indices int64 [m]."""
        passed = np.searchsorted(self._kept_at, kept, side="right")
        result: NDArray[np.int64] = kept + self._skipped_before[passed]
        return result

    def index(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the kept index int64 [m] of global rows int64 [m]; -1 for a skipped row."""
        begun = np.searchsorted(self._starts, rows, side="right")
        kept = rows - self._skipped_before[begun]
        ends = np.append(0, self._ends)  # where the last range that has begun ends
        return np.where(rows < ends[begun], -1, kept)

    def before(self, row: int) -> int:
        """Return how many kept rows there are below a global row."""
        return row - sum(b - a for a, b in clip_ranges(self.skip, 0, row))


def _check(item: Sequence[int]) -> Range:
    if (
        isinstance(item, str)
        or len(item) != 2
        or not all(isinstance(v, int) and not isinstance(v, bool) for v in item)
        or not 0 <= item[0] < item[1]
    ):
        raise UsageError(
            f"skip: {item!r} is not a range of rows",
            fix="write [first, one past the last], for example skip: [[4096, 8192]].",
        )
    return item[0], item[1]
