"""Tunes a contestant's rate and warm-up by a given number of runs, the same search for each.

rate x 3, / 3 until worse both ways -> warm-up x 2, / 2 likewise -> rate x 1.7, / 1.7 -> ...
"""

from __future__ import annotations

from collections.abc import Callable

from speedruns.budget import Tuning

Place = tuple[int, int]
"""Half steps of the rate from the start, each a factor of the root of 3; steps of the warm-up."""
MOVES: tuple[tuple[Place, Place], ...] = (((2, 0), (-2, 0)), ((0, 1), (0, -1)), ((1, 0), (-1, 0)))
MOST_WARMUP = 0.5


def tune(run: Callable[[Tuning], float], start: Tuning, runs: int) -> dict[Tuning, float]:
    """Return what was tried, at most `runs`, and the bits per byte that `run` gave for it."""
    found: dict[Place, float] = {}

    def tuning(place: Place) -> Tuning:
        warmup = min(MOST_WARMUP, start.warmup * 2.0 ** place[1])
        return Tuning(float(f"{start.rate * 3 ** (place[0] / 2):.2g}"), round(warmup, 4))

    def next_place() -> Place | None:
        if not found:
            return 0, 0
        best = min(found, key=found.__getitem__)
        for moves in MOVES:
            for rate, warmup in moves:
                place = best[0] + rate, best[1] + warmup
                if place not in found and start.warmup * 2.0 ** place[1] <= MOST_WARMUP:
                    return place
        return None

    while len(found) < runs and (place := next_place()) is not None:
        found[place] = run(tuning(place))
    return {tuning(place): bits for place, bits in found.items()}
