"""Statistics of shuffles: how likely a uniformly random permutation would look like this one.

Pure: orders in, p-values out. An order is int64 [m], the rows at positions 0 .. m - 1 of a
permutation of range(n); m < n where the permutation is too long to look at whole. Each p-value is
two-sided, as a shuffle that is too even is no random one either, and is uniform on 0 .. 1 over
uniformly random permutations: about one key in a hundred is below 0.01, whatever the statistic.

    places      early and late positions against low and high rows
    lags        serial correlation at five lags, the worst of them
    pairs       rows against the row after them, in 16 x 16 parts of the range
    low bits    position mod 16 against row mod 16
    bit pairs   row mod 8 against the next row mod 8: runs of odd and even rows, for one
    batches     which part of the range the rows of each batch of 256 come from
    values      (m < n only) whether the rows lie evenly in the range
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

PARTS = 16
BATCH = 256


def chi_square_p(statistic: float, freedom: int) -> float:
    """Two-sided p of a chi-square statistic (E. Wilson and M. Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return normal_p(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def normal_p(z: float) -> float:
    """Two-sided p of a standard normal value."""
    return math.erfc(abs(z) / math.sqrt(2))


def table_p(first: np.ndarray, second: np.ndarray, whole: bool) -> float:
    """Whether two labellings of the same things are independent.

    Args:
        first, second: integers [m] from 0 on, every label in use.
        whole: both margins are fixed, as those of a whole permutation are: the statistic is then
            larger by m / (m - 1) in the mean.
    """
    rows, columns = int(first.max()) + 1, int(second.max()) + 1
    table = np.bincount(first * columns + second, minlength=rows * columns).reshape(rows, columns)
    total = len(first)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / total
    statistic = float(((table - expected) ** 2 / expected).sum())
    if whole:
        statistic *= (total - 1) / total
    return chi_square_p(statistic, (rows - 1) * (columns - 1))


def part_of(order: np.ndarray, n: int) -> np.ndarray:
    """Which of `PARTS` equal parts of range(n) each row lies in."""
    return order // -(-n // PARTS)


def places(order: np.ndarray, n: int) -> float:
    """Whether early positions hold rows of some part of the range more often."""
    m = len(order)
    return table_p(part_of(np.arange(m), m), part_of(order, n), m == n)


def lags(order: np.ndarray, n: int) -> float:
    """Whether a row tells anything of the row k positions later, k = 1, 2, 3, 64, sqrt m."""
    m = len(order)
    x = order - order.mean()
    ps = []
    for lag in (1, 2, 3, 64, math.isqrt(m)):
        # mean and variance of the product sum over random orders, to the order of 1 / m
        r = float((x[:-lag] * x[lag:]).sum() / (x * x).sum())
        mean = -(m - lag) / (m * (m - 1)) if m == n else 0.0
        ps.append(normal_p((r - mean) * math.sqrt(m)))
    return 1 - (1 - min(ps)) ** len(ps)


def pairs(order: np.ndarray, n: int) -> float:
    """Whether the part of a row tells anything of the part of the next one."""
    part = part_of(order, n)
    return table_p(part[:-1], part[1:], len(order) == n)


def low_bits(order: np.ndarray, n: int) -> float:
    """Whether position mod 16 tells anything of row mod 16."""
    return table_p(np.arange(len(order)) % 16, order % 16, len(order) == n)


def bit_pairs(order: np.ndarray, n: int) -> float:
    """Whether the low bits of a row tell anything of those of the next one."""
    return table_p(order[:-1] % 8, order[1:] % 8, len(order) == n)


def batches(order: np.ndarray, n: int) -> float:
    """Whether batches of 256 rows draw from the parts of the range as evenly as chance does."""
    m = len(order) // BATCH * BATCH
    return table_p(np.arange(m) // BATCH, part_of(order[:m], n), len(order) == n)


def values(order: np.ndarray, n: int) -> float:
    """Whether rows lie evenly in the range, where only some of them are looked at."""
    count = np.bincount(part_of(order, n), minlength=PARTS)
    size = -(-n // PARTS)
    share = np.minimum(size, n - size * np.arange(PARTS)) / n
    expected = share * len(order)
    return chi_square_p(float(((count - expected) ** 2 / expected).sum()), PARTS - 1)


STATISTICS: dict[str, Callable[[np.ndarray, int], float]] = {
    "places": places,
    "lags": lags,
    "pairs": pairs,
    "low bits": low_bits,
    "bit pairs": bit_pairs,
    "batches": batches,
}


def against_each_other(one: np.ndarray, other: np.ndarray, n: int) -> float:
    """Whether the row that one key puts at a position tells anything of another key's."""
    return table_p(part_of(one, n), part_of(other, n), len(one) == n)


def uniform_p(ps: Sequence[float]) -> float:
    """p of the Kolmogorov-Smirnov test that `ps` are uniform on 0 .. 1 (M. Stephens, 1970)."""
    count = len(ps)
    ordered = np.sort(np.asarray(ps))
    steps = np.arange(count + 1) / count
    distance = max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))
    root = math.sqrt(count)
    x = distance * (root + 0.12 + 0.11 / root)
    series = sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return 1.0 if x < 0.2 else min(1.0, max(0.0, 2 * series))
