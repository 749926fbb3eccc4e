"""The curves of a run as a page draws them: every step is kept, a bounded number of points is sent.

    extend(steps)...        points(have) -> the points that are new

A point stands for `size` neighbouring steps, a power of two that grows with the run: a million
steps are about 2,000 points, with lowest and highest values so that no spike is lost. Points that
were sent do not change until `size` does, but for the last one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from olm_data.extensions.watching.step_lines import StepColumns

MOST_POINTS = 2000


class Points(msgspec.Struct, frozen=True, kw_only=True):
    """Points of curves, all over the same steps.

    Attributes:
        first: number of the first one sent, from 0.
        size: steps that each stands for.
        steps: the first step of each.
        tokens: trained on after the first step of each.
        time: seconds from the run's first step to the first step of each.
        values: mean of each by metric; None where nothing was logged.
        low, high: of the metrics, where a point stands for several steps; else empty.
    """

    first: int
    size: int
    steps: list[int]
    tokens: list[int]
    time: list[float]
    values: dict[str, list[float | None]]
    low: dict[str, list[float | None]]
    high: dict[str, list[float | None]]


class Curves:
    """The values of some metrics at all steps of a run.

    Args:
        names: of the metrics.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._steps, self._places, self._tokens = array("q"), array("q"), array("q")
        self._times = array("d")
        self._values = {name: array("d") for name in names}

    def __len__(self) -> int:
        return len(self._steps)

    def extend(self, steps: StepColumns) -> None:
        """Add steps, and where their lines stand in the log."""
        self._steps.frombytes(steps.step.astype(np.int64).tobytes())
        self._places.frombytes(steps.place.astype(np.int64).tobytes())
        self._tokens.frombytes(steps.tokens.astype(np.int64).tobytes())
        self._times.frombytes(steps.time.astype(np.float64).tobytes())
        for name, column in self._values.items():
            column.frombytes(steps.metrics[name].astype(np.float64).tobytes())

    def place(self, step: int) -> int | None:
        """Return where the line of the step stands, or of the last one before it; None: none."""
        if not self._steps:
            return None
        index = int(np.searchsorted(np.array(self._steps), step, side="right")) - 1
        return self._places[max(0, index)]

    def between(self, first: int, last: int) -> range:
        """Return the indices of the steps from `first` to `last`, both of them included."""
        steps = np.array(self._steps)
        return range(
            int(np.searchsorted(steps, first)), int(np.searchsorted(steps, last, side="right"))
        )

    def last(self, name: str, count: int = 1) -> float | None:
        """Return the mean of the last `count` steps at which a metric was logged; None: never."""
        tail = np.array(self._values[name][-max(64, 4 * count) :])
        tail = tail[np.isfinite(tail)][-count:]
        return float(tail.mean()) if len(tail) else None

    def points(self, indices: range, size: int = 0, have: int = 0) -> Points:
        """Return points of some steps.

        Args:
            indices: of the steps.
            size, have: size and number of the points that are known; the last one is sent again.
        """
        wanted = 1
        while -(-len(indices) // wanted) > MOST_POINTS:
            wanted *= 2
        first = max(0, have - 1) if size == wanted and have * size < len(indices) + size else 0
        part = slice(indices.start + first * wanted, indices.stop)
        values, low, high = {}, {}, {}
        for name, column in self._values.items():
            rows = _in_rows(np.array(column[part]), wanted)
            there = np.isfinite(rows)
            with np.errstate(invalid="ignore"):
                values[name] = _plain(np.where(there, rows, 0).sum(1) / there.sum(1))
            if wanted > 1:
                low[name] = _plain(np.where(there, rows, np.inf).min(1))
                high[name] = _plain(np.where(there, rows, -np.inf).max(1))
        steps, tokens, times = (
            np.array(column[part])[::wanted] for column in (self._steps, self._tokens, self._times)
        )
        began = self._times[0] if self._times else 0.0
        return Points(
            first=first,
            size=wanted,
            steps=steps.tolist(),
            tokens=tokens.tolist(),
            time=np.round(times - began, 3).tolist(),
            values=values,
            low=low,
            high=high,
        )


def _in_rows(values: np.ndarray, size: int) -> np.ndarray:
    """float64 [n] -> [ceil(n / size), size], NaN at the end."""
    padding = np.full(-len(values) % size, np.nan)
    return np.concatenate([values.astype(np.float64), padding]).reshape(-1, size)


def _plain(values: np.ndarray) -> list[float | None]:
    """Return numbers of six digits: more is seen on no screen."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
