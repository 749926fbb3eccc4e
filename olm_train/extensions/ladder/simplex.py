"""Points of a mixture search: shares of sources that sum to 1, within bounds, far from each other.

Numbers are NumPy's, without a run or a file:

    natural shares, bounds -> Dirichlet draws, around the natural shares and over all
                           -> scaled into the bounds, in thousandths
                           -> each next point the farthest from those there are (maximin)

Draws around the natural shares: RegMix (Liu et al., arXiv 2407.01492).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from olm_train.extensions.ladder.law import Floats

PARTS = 1000
"""Shares are whole numbers of these parts: exact in a manifest, and a block of a lock is short."""
DRAWS = 4096
LEAST_STRENGTH, MOST_STRENGTH = 0.3, 30.0
"""Of the draws around the natural shares: the sum of their Dirichlet parameters, for a source."""


class Region(NamedTuple):
    """Mixtures that may be trained: float64 [sources] each; `low` <= share <= `high`.

    Attributes:
        natural: shares of the sources by their tokens.
    """

    natural: Floats
    low: Floats
    high: Floats

    def within(self, shares: Floats) -> Floats:
        """Return shares [n, sources] scaled by a number each, and cut at the bounds, so that they
        sum to 1; in whole parts."""
        positive = np.maximum(shares, 1e-9)
        least, most = np.full(len(shares), -30.0), np.full(len(shares), 30.0)
        for _ in range(60):
            middle = (least + most) / 2
            full = np.clip(positive * np.exp(middle)[:, None], self.low, self.high).sum(1) > 1
            least, most = np.where(full, least, middle), np.where(full, middle, most)
        scaled = np.clip(positive * np.exp(least)[:, None], self.low, self.high)
        return self._whole(scaled)

    def _whole(self, shares: Floats) -> Floats:
        """Return shares in whole parts, by largest remainder, within the bounds."""
        low, high = np.ceil(self.low * PARTS - 1e-6), np.floor(self.high * PARTS + 1e-6)
        parts = np.clip(np.floor(shares * PARTS + 1e-6), low, high) + 0.0
        rows = np.arange(len(parts))
        while (left := PARTS - parts.sum(1)).any():
            sign = np.sign(left)[:, None]
            free = np.where(sign > 0, parts < high, parts > low)
            wish = np.where(free, sign * (shares * PARTS - parts), -np.inf)
            parts[rows, wish.argmax(1)] += sign[:, 0]
        return parts / PARTS

    def draws(self, count: int, random: np.random.Generator) -> Floats:
        """Return mixtures [count, sources]: half around the natural shares, half over all."""
        sources = len(self.natural)
        strength = np.geomspace(LEAST_STRENGTH, MOST_STRENGTH, count // 2)[:, None] * sources
        alpha = np.vstack([strength * self.natural, np.ones((count - count // 2, sources))])
        gamma = random.standard_gamma(np.maximum(alpha, 1e-3))
        return self.within(gamma / np.maximum(gamma.sum(1, keepdims=True), 1e-300))

    def baselines(self) -> Floats:
        """Return the natural and the uniform mixture, within the bounds: [2, sources]."""
        return self.within(np.array([self.natural, np.full(len(self.natural), 1.0)]))

    def spread(self, points: Floats, count: int, seed: int) -> Floats:
        """Return `points` [m, sources] and as many more as make `count`, far from those before."""
        found, candidates = points, self.draws(DRAWS, np.random.default_rng(seed))
        distance = np.full(len(candidates), np.inf)
        for point in points:
            distance = np.minimum(distance, np.sum((candidates - point) ** 2, axis=1))
        while len(found) < count:
            best = candidates[distance.argmax()]
            if not distance.max():
                break
            found = np.vstack([found, best])
            distance = np.minimum(distance, np.sum((candidates - best) ** 2, axis=1))
        return found


def unlike(points: Floats) -> NDArray[np.intp]:
    """Return the first place of each point [n, sources], ascending."""
    return np.sort(np.unique(np.round(points * PARTS), axis=0, return_index=True)[1])
