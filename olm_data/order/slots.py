"""Mixing: exact shares of the sources, compiled to integer counts per block and laid out in slots.

    shares (Fractions) --compile_shares--> counts per block of B rows --slot_table--> slots

A stage of a run repeats its block of B slots. The counts are constant, so how often a source was
drawn before a block is one multiplication, and the layout keeps every prefix of the stage within
one row of every source's share. Pure: integers and fractions in, integers out; no files, no clock,
no floating point.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter

import numpy as np

FIRST_BLOCK = 1 << 16
MAX_BLOCK = 1 << 20
TOLERANCE = Fraction(1, 10_000)


@dataclass(frozen=True, eq=False)
class SlotTable:
    """One block of a stage, slot by slot; arrays are read-only.

    Attributes:
        source: int32[B], the source of each slot.
        rank: int32[B], how many earlier slots of the block have the same source.
        slots: int32[B], the slots sorted by (source, slot); those of source s are
            `slots[first[s] : first[s + 1]]`, so that the slot of (source, rank) is
            `slots[first[source] + rank]`.
        first: int64[sources + 1].
    """

    source: np.ndarray
    rank: np.ndarray
    slots: np.ndarray
    first: np.ndarray

    def before(self, slot: int) -> np.ndarray:
        """Return int64[sources]: how many of the first `slot` slots each source has."""
        return np.bincount(self.source[:slot], minlength=len(self.first) - 1).astype(np.int64)


def normalise(weights: Sequence[Fraction | int]) -> tuple[Fraction, ...]:
    """Return the weights divided by their sum: exact shares that add up to 1.

    Raises:
        ValueError: a negative weight, or weights that sum to 0.
    """
    total = sum(map(Fraction, weights), Fraction(0))
    if total <= 0 or any(weight < 0 for weight in weights):
        raise ValueError("weights must not be negative, and at least one must be positive")
    return tuple(Fraction(weight) / total for weight in weights)


def compile_shares(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the rows of each source in a block, for shares that sum to 1.

    Where the common denominator of the shares is at most 2^20 it is the block length B and the
    counts are exact. Otherwise the counts are rounded by largest remainder for B = 2^16, 2^17, ...
    2^20, and the first B with every relative error below 1/10,000 is taken, or else the B with the
    smallest largest error (the shortest of equals).
    """
    if sum(shares) != 1 or any(share < 0 for share in shares):
        raise ValueError("shares must not be negative and must sum to 1")
    denominator = math.lcm(*(share.denominator for share in shares))
    if denominator <= MAX_BLOCK:
        return tuple(int(share * denominator) for share in shares)
    tried: list[tuple[Fraction, tuple[int, ...]]] = []
    block = FIRST_BLOCK
    while block <= MAX_BLOCK and (not tried or tried[-1][0] >= TOLERANCE):
        counts = round_counts(shares, block)
        tried.append((largest_error(counts, shares), counts))
        block *= 2
    return min(tried, key=itemgetter(0))[1]


def largest_error(counts: Sequence[int], shares: Sequence[Fraction]) -> Fraction:
    """Return the largest |count / B - share| / share of the sources with a share, B all counts."""
    block, pairs = sum(counts), zip(counts, shares, strict=True)
    return max(abs(Fraction(count, block) - share) / share for count, share in pairs if share)


def round_counts(shares: Sequence[Fraction], block: int) -> tuple[int, ...]:
    """Round `shares * block` to integers with sum `block`, by largest remainder (Hamilton).

    Equal remainders go to the earlier source.
    """
    return round_amounts([share * block for share in shares], block)


def round_amounts(amounts: Sequence[Fraction], total: int) -> tuple[int, ...]:
    """Round amounts that sum to the integer `total` so that they still do, by largest remainder.

    None is rounded above the next integer, so integer limits on the amounts are kept.
    """
    counts = [int(amount) for amount in amounts]
    by_remainder = sorted(range(len(amounts)), key=lambda s: (counts[s] - amounts[s], s))
    for source in by_remainder[: total - sum(counts)]:
        counts[source] += 1
    return tuple(counts)


def exact_parts(rows: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Cut a stage that draws exactly `rows` of each source into parts with counts per block.

    One part, where the rows have a common divisor that leaves a block of at most 2^20. Otherwise
    q = ceil(total / 2^20) blocks of floor(rows / q), and the few rows left over in the same way.

    Returns:
        (rows, counts) of each part: whole blocks, which together draw exactly `rows`.
    """
    total = sum(rows)
    if not total:
        return ()
    divisor = math.gcd(*rows)
    if total // divisor <= MAX_BLOCK:
        return ((total, tuple(count // divisor for count in rows)),)
    blocks = -(-total // MAX_BLOCK)
    counts = tuple(count // blocks for count in rows)
    rest = [count % blocks for count in rows]
    return ((blocks * sum(counts), counts), *exact_parts(rest))


def slot_table(counts: Sequence[int]) -> SlotTable:
    """Lay out one block so that every prefix is within one row of every source's share.

    Tijdeman's chairman assignment (R. Tijdeman, "The chairman assignment problem", Discrete
    Mathematics 32, 1980) as earliest deadline first over unit jobs, in exact integers. With
    B = sum(counts), k = the number of sources with a count, and K = max(2k - 2, 1), job j of source
    s (j = 0, 1, ...; slots from 0) may be done in the slots

        release  = ceil(B * (jK + 1) / (K * counts[s])) - 1    up to
        deadline = floor(B * ((j + 1)K - 1) / (K * counts[s])),

    which says |drawn - share * slots| <= 1 - 1/K after each slot. Each slot goes to the released
    job with the earliest deadline, equal deadlines to the smaller s. With k = 1 every slot is its.

    Args:
        counts: rows of each source per block, non-negative, sum in 1 .. 2^20.
    """
    per_source = np.asarray(counts, dtype=np.int64)
    block = int(per_source.sum())
    if not 1 <= block <= MAX_BLOCK or (per_source < 0).any():
        raise ValueError(f"counts must not be negative and must sum to 1 .. {MAX_BLOCK}")
    first = np.concatenate([[0], np.cumsum(per_source)])
    job_source = np.repeat(np.arange(len(per_source)), per_source)
    job = np.arange(block) - first[job_source]

    active = int((per_source > 0).sum())
    if active == 1:
        source = job_source
    else:
        k = 2 * active - 2  # products below stay under 2^20 * 2^20 * 2^21 = 2^61
        per_job = k * per_source[job_source]
        release = -(-block * (job * k + 1) // per_job) - 1
        deadline = block * ((job + 1) * k - 1) // per_job
        source = _earliest_deadline_first(release, deadline, job_source, len(per_source))

    slots = np.argsort(source, kind="stable")
    rank = np.empty(block, dtype=np.int32)
    rank[slots] = job
    table = SlotTable(source.astype(np.int32), rank, slots.astype(np.int32), first)
    for array in (table.source, table.rank, table.slots, table.first):
        array.flags.writeable = False
    return table


def _earliest_deadline_first(
    release: np.ndarray, deadline: np.ndarray, job_source: np.ndarray, sources: int
) -> np.ndarray:
    """Return int64[B]: the source whose job is done in each slot, one job a slot."""
    order = np.argsort(release, kind="stable")
    # One integer a job, so that the heap compares (deadline, source) at the price of one compare.
    keys = (deadline * sources + job_source)[order].tolist()
    block = len(keys)
    released = np.searchsorted(release[order], np.arange(block), side="right").tolist()
    heap: list[int] = []
    done = [0] * block
    position = 0
    for slot, end in enumerate(released):
        if end == position + 1:
            done[slot] = heapq.heappushpop(heap, keys[position])
            position = end
            continue
        while position < end:
            heapq.heappush(heap, keys[position])
            position += 1
        done[slot] = heapq.heappop(heap)
    return np.array(done, dtype=np.int64) % sources
