"""How fast work goes now and how long it will take: a sliding window and a forecast. Pure.

    (seconds, amount so far), ... -> Window.rate            per second, over the last seconds only
    planned sizes, bytes of text done -> forecast           (done, still to do), in bytes of text

Recent speed, not the average since the start: a run that slows down must show it, and a run that
was resumed must not be judged by its first minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

WINDOW_SECONDS = 20.0
LEAST_STEP = 0.1


class Window:
    """The rate of a growing amount over the last `seconds`.

    Args:
        seconds: width of the window. At most `seconds / LEAST_STEP` samples are kept.
    """

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self.seconds = seconds
        self._samples: deque[tuple[float, float]] = deque()
        self._changed = 0.0

    def add(self, now: float, amount: float) -> None:
        """Note that `amount` was done at the time `now`; times do not fall.

        An amount that falls (a worker died, its task begins again) begins the window anew.
        """
        samples = self._samples
        if not samples or amount != samples[-1][1]:
            self._changed = now
        if samples and amount < samples[-1][1]:
            samples.clear()
        if len(samples) > 1 and now - samples[-2][0] < LEAST_STEP:
            samples[-1] = (now, amount)
        else:
            samples.append((now, amount))
        while len(samples) > 2 and samples[1][0] <= now - self.seconds:
            samples.popleft()

    @property
    def rate(self) -> float:
        """Amount a second over the window; 0 while there is nothing to measure."""
        if len(self._samples) < 2:
            return 0.0
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last > first else 0.0

    @property
    def still(self) -> float:
        """Seconds since the amount last changed, as of the last sample."""
        return self._samples[-1][0] - self._changed if self._samples else 0.0


def forecast(
    planned: Sequence[int] | np.ndarray, finished: np.ndarray, text_bytes: np.ndarray
) -> tuple[float, float]:
    """Tell how much work is done and how much is left, in the same unit.

    The plan guesses sizes from file sizes. Once tasks are finished, the guesses for the rest are
    scaled by how wrong they were for these.

    Args:
        planned: int64 [tasks], guessed bytes of text; all 0 where the source cannot tell.
        finished: bool [tasks].
        text_bytes: int64 [tasks], bytes of text seen so far.

    Returns:
        (done, left), both at least 0; in tasks instead of bytes while no bytes can be told.
    """
    sizes = np.asarray(planned, np.float64)
    known = bool(sizes.any())
    weights = np.maximum(sizes, 1.0) if known else np.ones(len(sizes))
    seen = np.asarray(text_bytes, np.float64)
    of_finished = float(seen[finished].sum())
    if (finished.any() and of_finished == 0) or (not finished.any() and not known):
        return float(weights[finished].sum()), float(weights[~finished].sum())
    scale = of_finished / float(weights[finished].sum()) if finished.any() else 1.0
    left = np.maximum(weights * scale - seen, 0.0)[~finished]
    return float(seen.sum()), float(left.sum())
