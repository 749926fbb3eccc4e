"""Summaries of any number of values in bounded memory, which merge: parts may be taken apart.

    LogHistogram   counts and sums in bins of equal ratio, exact
    Quantiles      any quantile within 1 % of the value (Masson, Rim and Lee, VLDB 2019: DDSketch)
    Frequent       the values that come often (Misra and Gries 1982; merge: Agarwal et al. 2012)
    TopK           the k smallest keys with their numbers, exact

Pure. Merging parts gives what one summary of all values gives; for `Frequent`, within its error.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

BINS_AN_OCTAVE = 4
_EDGES = np.unique(np.ceil(2.0 ** (np.arange(62 * BINS_AN_OCTAVE) / BINS_AN_OCTAVE))).astype(
    np.int64
)
_GAMMA = np.log(1.02)  # bins of 2 %: the middle is within 1 %


class LogHistogram:
    """How many positive integers there are between 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...

    Attributes:
        counts: int64 [bins], values in each bin.
        sums: int64 [bins], sum of the values in each bin.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(len(_EDGES), np.int64)
        self.sums = np.zeros(len(_EDGES), np.int64)

    def add(self, values: np.ndarray) -> None:
        """Add int64 [n] values, each at least 1."""
        bins = np.searchsorted(_EDGES, values, side="right") - 1
        self.counts += np.bincount(bins, minlength=len(_EDGES))
        np.add.at(self.sums, bins, values)

    def merge(self, other: LogHistogram) -> None:
        """Add what another histogram holds."""
        self.counts += other.counts
        self.sums += other.sums

    def bins(self, *, octaves: bool = False) -> list[tuple[int, int, int, int]]:
        """Return (first, last, count, sum) of each bin between the outermost ones in use.

        Args:
            octaves: join the bins to 1, 2-3, 4-7, 8-15, ...
        """
        edges, counts, sums = _EDGES, self.counts, self.sums
        if octaves:
            starts = np.searchsorted(edges, 2 ** np.arange(62))
            edges = edges[starts]
            counts, sums = np.add.reduceat(counts, starts), np.add.reduceat(sums, starts)
        full = np.flatnonzero(counts)
        if not len(full):
            return []
        return [
            (int(edges[i]), int(edges[i + 1]) - 1, int(counts[i]), int(sums[i]))
            for i in range(int(full[0]), int(full[-1]) + 1)
        ]


class Quantiles:
    """Quantiles of numbers, within 1 % of the value.

    Attributes:
        count: finite numbers seen.
        least, most: exact; 0 before there is any.
        odd: numbers that are NaN or infinite; they count for nothing else.
    """

    def __init__(self) -> None:
        self.count = self.odd = 0
        self.least, self.most = np.inf, -np.inf
        self._bins: dict[int, int] = {}  # sorted keys are sorted values

    def add(self, values: np.ndarray) -> None:
        """Add float64 or int64 [n] values."""
        numbers = np.asarray(values, np.float64)
        finite = np.isfinite(numbers)
        self.odd += int(len(numbers) - finite.sum())
        numbers = numbers[finite]
        if not len(numbers):
            return
        self.count += len(numbers)
        self.least = min(self.least, float(numbers.min()))
        self.most = max(self.most, float(numbers.max()))
        size = np.abs(numbers)
        keys = np.zeros(len(numbers), np.int64)
        some = size > 0
        # magnitudes from 5e-324 give keys above 0; the sign puts negative numbers below
        keys[some] = np.ceil(np.log(size[some]) / _GAMMA).astype(np.int64) + 40_000
        keys *= np.sign(numbers).astype(np.int64)
        for key, count in zip(*np.unique(keys, return_counts=True), strict=True):
            self._bins[int(key)] = self._bins.get(int(key), 0) + int(count)

    def merge(self, other: Quantiles) -> None:
        """Add what another sketch holds."""
        self.count += other.count
        self.odd += other.odd
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        for key, count in other._bins.items():
            self._bins[key] = self._bins.get(key, 0) + count

    def at(self, share: float) -> float:
        """Return the value that `share` of the numbers are at most, within 1 %; 0 of no numbers."""
        if not self.count:
            return 0.0
        rank, seen = share * (self.count - 1), 0
        for key in sorted(self._bins):
            seen += self._bins[key]
            if seen > rank:
                size = 0.0 if key == 0 else float(np.exp((abs(key) - 40_000 - 0.5) * _GAMMA))
                return min(max(size if key > 0 else -size, self.least), self.most)
        return self.most


class Frequent:
    """The values that come most often, of any number of different ones.

    Args:
        most: values kept. Every value that makes up more than 1 / `most` of all is among them.

    Attributes:
        total: values seen.
        error: most by which a count may be too low; 0 while there were at most `most` values.
    """

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.total = self.error = 0
        self._counts: dict[str, int] = {}

    def add(self, counts: Mapping[str, int]) -> None:
        """Add values with how often each comes."""
        for value, count in counts.items():
            self._counts[value] = self._counts.get(value, 0) + count
            self.total += count
        self._prune()

    def merge(self, other: Frequent) -> None:
        """Add what another summary holds."""
        total = self.total + other.total
        self.add(other._counts)
        self.total, self.error = total, self.error + other.error

    def top(self, count: int) -> list[tuple[str, int]]:
        """Return the most frequent values with counts, each at most `error` too low."""
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))[:count]

    @property
    def distinct(self) -> int | None:
        """How many different values there are; None if there were too many to count."""
        return len(self._counts) if self.error == 0 else None

    def _prune(self) -> None:
        if len(self._counts) <= self.most:
            return
        cut = sorted(self._counts.values(), reverse=True)[self.most]
        self._counts = {value: n - cut for value, n in self._counts.items() if n > cut}
        self.error += cut


class TopK:
    """The `k` smallest keys and the numbers they belong to; among equals, the lower number."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._keys, self._numbers = np.zeros(0), np.zeros(0, np.int64)

    def add(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        """Add float64 [n] keys and int64 [n] numbers."""
        if len(keys) > self.k:  # all that are not above the k-th, so that ties stay complete
            chosen = keys <= np.partition(keys, self.k - 1)[self.k - 1]
            keys, numbers = keys[chosen], numbers[chosen]
        keys = np.concatenate([self._keys, keys])
        numbers = np.concatenate([self._numbers, numbers])
        order = np.lexsort((numbers, keys))[: self.k]
        self._keys, self._numbers = keys[order], numbers[order]

    def merge(self, other: TopK) -> None:
        """Add what another one holds."""
        self.add(other._keys, other._numbers)

    def items(self) -> list[tuple[float, int]]:
        """Return (key, number) pairs, smallest key first."""
        return list(zip(self._keys.tolist(), self._numbers.tolist(), strict=True))
