"""What a ladder found: its law with bands, the error at its largest rung, three ways side by side.

points -> lowest loss of each size and length -> without the largest size: law -> its error
                                              -> all: law, bands, exponent of the best size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.errors import InputError
from olm_data.printing import Loss, Share, ShareError
from olm_train.extensions.ladder.design import Design
from olm_train.extensions.ladder.law import Floats, Law, Runs, band, fit, resampled
from olm_train.extensions.ladder.points import Point, as_runs, frontier

DRAWS = 400
SAME_COMPUTE = 0.1
"""Relative difference of computes that are one isoFLOP curve."""


class Parameter(msgspec.Struct, frozen=True):
    """A number of the law, and its 90 % band."""

    name: str
    value: float
    low: float
    high: float


class HeldOutRun(msgspec.Struct, frozen=True):
    """A run of the largest size, and what the smaller ones say of it.

    Attributes:
        error: (predicted - loss) / loss.
    """

    name: str
    parameters: int
    tokens: int
    loss: Loss
    predicted: Loss
    error: ShareError


class Approach(msgspec.Struct, frozen=True):
    """One of the three ways of Hoffmann et al. (2022).

    Attributes:
        exponent: a of N ~ C^a, the size that makes the most of a compute; None: see `why`.
    """

    approach: str
    exponent: float | None = None
    why: str = ""


class Fit(msgspec.Struct, frozen=True):
    """What a ladder found.

    Attributes:
        held_out_error: largest relative error of the law of the smaller sizes at the largest one,
            by its absolute value; None: the smaller sizes do not determine a law.
        residual: root mean square of the relative errors, for the points less the five parameters.
        disagreement: largest less smallest exponent of the approaches that could be taken.
    """

    COLUMNS: ClassVar = {"law": None}

    held_out_error: ShareError | None
    points: int
    sizes: int
    residual: Share
    disagreement: float | None
    warnings: list[str]
    law: Law
    parameters: list[Parameter]
    approaches: list[Approach]
    held_out: list[HeldOutRun]


def fitted(points: Sequence[Point], draws: int = DRAWS) -> Fit:
    """Fit the points of a ladder.

    Raises:
        InputError: they do not determine a law.
    """
    best = frontier(points)
    runs = as_runs(best)
    law, spread, warnings = determined(runs)
    laws = np.array(resampled(runs, law, draws))
    low, high = band(laws)
    ways = approaches(runs, np.array([point.flops for point in best]), law)
    exponents = [way.exponent for way in ways if way.exponent is not None]
    held_out = _held_out(best)
    errors = [row.error for row in held_out]
    return Fit(
        held_out_error=max(errors, key=abs, default=None),
        points=len(best),
        sizes=len(set(runs.parameters)),
        residual=spread,
        disagreement=max(exponents) - min(exponents) if len(exponents) > 1 else None,
        warnings=warnings,
        law=law,
        parameters=[
            Parameter(name, float(value), float(least), float(most))
            for name, value, least, most in zip(Law._fields, law, low, high, strict=True)
        ],
        approaches=ways,
        held_out=held_out,
    )


def determined(runs: Runs) -> tuple[Law, float, list[str]]:
    """Return the law of runs, its residual, and what these runs leave open.

    Raises:
        InputError: they are fewer than six, or of fewer than three sizes or lengths.
    """
    sizes, lengths = len(set(runs.parameters)), len(set(runs.tokens))
    if len(runs.loss) < 6 or sizes < 3 or lengths < 3:
        raise InputError(
            f"{len(runs.loss)} points of {sizes} sizes and {lengths} lengths do not determine "
            "E, A, alpha, B and beta",
            fix="train at least 6 points, of 3 sizes and 3 lengths each",
        )
    law = fit(runs)
    errors = runs.loss / law.loss(runs.parameters, runs.tokens) - 1
    spread = float(np.sqrt(np.sum(errors**2) / (len(errors) - 5)))
    design = Design(runs.parameters, runs.tokens, law, max(spread, 1e-9))
    return law, spread, design.problems()


def _held_out(points: list[Point]) -> list[HeldOutRun]:
    most = max(point.parameters for point in points)
    try:
        law, _, _ = determined(as_runs([point for point in points if point.parameters < most]))
    except InputError:
        return []
    largest = [point for point in points if point.parameters == most]
    said = [float(law.loss(point.parameters, point.tokens)) for point in largest]
    return [
        HeldOutRun(p.name, p.parameters, p.tokens, p.loss, loss, (loss - p.loss) / p.loss)
        for p, loss in zip(largest, said, strict=True)
    ]


def approaches(runs: Runs, flops: Floats, law: Law) -> list[Approach]:
    """Return the exponent of the best size by each of the three approaches.

    Args:
        flops: float64 [runs], of the runs.
    """
    names = ("1, envelope of the curves", "2, isoFLOP parabolas", "3, parametric")
    return [
        _approach(names[0], envelope(runs.parameters, flops, runs.loss), "winners"),
        _approach(names[1], parabolas(runs.parameters, flops, runs.loss), "computes"),
        Approach(names[2], law.size_exponent),
    ]


def _approach(name: str, best: list[tuple[float, float]], what: str) -> Approach:
    """Return the slope of log N by log C through the best sizes of computes."""
    if len({size for _, size in best}) < 3:
        return Approach(name, why=f"the design has fewer than 3 {what} of unlike size")
    compute, size = np.log(np.array(best)).T
    return Approach(name, float(np.polyfit(compute, size, 1)[0]))


def envelope(parameters: Floats, flops: Floats, loss: Floats) -> list[tuple[float, float]]:
    """Return computes and the size of the lowest loss there, of the curves through each size.

    Only computes that at least two sizes were trained with are looked at.
    """
    grid = np.geomspace(flops.min(), flops.max(), 200)
    sizes = np.unique(parameters)
    curves = np.full((len(sizes), len(grid)), np.inf)
    for row, size in zip(curves, sizes, strict=True):
        mine = np.flatnonzero(parameters == size)
        mine = mine[np.argsort(flops[mine])]
        at = np.log(flops[mine])
        row[:] = np.interp(np.log(grid), at, loss[mine], left=np.inf, right=np.inf)
    shared = np.isfinite(curves).sum(axis=0) > 1
    return [(float(grid[k]), float(sizes[np.argmin(curves[:, k])])) for k in np.flatnonzero(shared)]


def of_one_compute(flops: Floats) -> list[NDArray[np.intp]]:
    """Return the places of runs of about the same FLOPs together, by rising FLOPs."""
    order = np.argsort(flops)
    return np.split(order, np.flatnonzero(np.diff(np.log(flops[order])) > SAME_COMPUTE) + 1)


def parabolas(parameters: Floats, flops: Floats, loss: Floats) -> list[tuple[float, float]]:
    """Return computes that three sizes were trained with, and the best size of each by a parabola.

    One whose lowest point is outside of its sizes says nothing, and is left out.
    """
    best = []
    for group in of_one_compute(flops):
        if len(set(parameters[group])) < 3:
            continue
        size = np.log(parameters[group])
        bend, slope, _ = np.polyfit(size - size.mean(), loss[group], 2)
        lowest = size.mean() - slope / (2 * bend) if bend > 0 else np.inf
        if size.min() < lowest < size.max():
            best.append((float(np.exp(np.log(flops[group]).mean())), float(np.exp(lowest))))
    return best
