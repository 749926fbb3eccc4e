"""A stage whose weights go from one mixture to another: a staircase of steps with constant counts.

    shares at the start, shares at the end, rows --staircase--> Step, Step, ...

What a source gives up to row x of a ramp of R rows is the integral a x + (b - a) x^2 / 2R of its
share, a at the start and b at the end. After each step every source has given that, rounded up or
down; inside a step its share is constant. Pure: fractions and integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from olm_data.order.slots import round_counts

STEPS = 100
"""Steps of a ramp; inside one a source is at most 1/8 of the step's rise of its rows off."""

LONGEST = 1 << 14
"""Rows of a step, and slots of its block; a longer step repeats its block."""


@dataclass(frozen=True)
class RampStep:
    """Rows with constant counts; whole blocks.

    Attributes:
        counts: rows of each source in a block.
        wanted: share of each source: the mean of the ramp over these rows.
    """

    rows: int
    counts: tuple[int, ...]
    wanted: tuple[Fraction, ...]


def staircase(start: Sequence[Fraction], end: Sequence[Fraction], rows: int) -> list[RampStep]:
    """Cut a ramp of `rows` rows into steps, so that no rounding adds up.

    With q = ceil(rows / (STEPS * LONGEST)) the ramp has R = floor(rows / q) units of q rows. Step i
    ends with unit floor((i + 1) R / STEPS), and up to there a source has given its integral,
    rounded up or down, times q. The fewer than q rows behind the last unit have the shares of the
    end.

    Args:
        start, end: share of each source; each sums to 1.
    """
    times = -(-rows // (STEPS * LONGEST))
    units = rows // times
    ends = sorted({units * i // STEPS for i in range(STEPS + 1)})
    upto = [
        [a * x + (b - a) * Fraction(x * x, 2 * units) for a, b in zip(start, end, strict=True)]
        for x in ends
    ]
    given, steps = [0] * len(start), list[RampStep]()
    for step, (first, last) in enumerate(pairwise(ends)):
        counts = [max(int(w) - g, 0) for w, g in zip(upto[step + 1], given, strict=True)]
        # one more unit of the sources that may give it now and must do so soonest
        more = [
            (_due(upto[step + 2 :], s, given[s] + counts[s] + 1), s)
            for s in range(len(start))
            if given[s] + counts[s] < upto[step + 1][s]
        ]
        for _, s in sorted(more)[: last - first - sum(counts)]:
            counts[s] += 1
        given = [g + count for g, count in zip(given, counts, strict=True)]
        common = math.gcd(*counts)
        wanted = [(b - a) / (last - first) for a, b in zip(upto[step], upto[step + 1], strict=True)]
        block = tuple(count // common for count in counts)
        steps.append(RampStep((last - first) * times, block, tuple(wanted)))
    if rest := rows - units * times:
        steps.append(RampStep(rest, round_counts(end, rest), tuple(end)))
    return steps


def _due(later: Sequence[Sequence[Fraction]], source: int, amount: int) -> int:
    """Return after how many later steps a source must have given an amount."""
    return next((k for k, upto in enumerate(later) if upto[source] >= amount), len(later))
