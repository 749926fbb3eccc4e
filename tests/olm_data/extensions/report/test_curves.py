"""Curves of any length are a bounded number of points, sent piece by piece without a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from olm_data.extensions.report.curves import MOST_POINTS, Curves, Points
from olm_data.extensions.watching.follow import StepColumns


def columns(
    steps: Sequence[int], values: Sequence[float] | np.ndarray, place: int = 1
) -> StepColumns:
    """Steps with one metric, whose lines stand at `place` times their number."""
    step = np.array(steps, np.int64)
    nothing = np.zeros(len(step))
    rows = np.zeros((len(step), 2), np.int64)
    return StepColumns(place * step, step, step, nothing, rows, {"a": np.array(values)})


def joined(old: Points | None, new: Points) -> Points:
    """What a page makes of what it has and what comes."""
    if old is None or new.first == 0 or old.size != new.size:
        return new
    return Points(
        first=0,
        size=new.size,
        steps=old.steps[: new.first] + new.steps,
        tokens=old.tokens[: new.first] + new.tokens,
        time=old.time[: new.first] + new.time,
        values={n: old.values[n][: new.first] + v for n, v in new.values.items()},
        low={n: old.low[n][: new.first] + v for n, v in new.low.items()},
        high={n: old.high[n][: new.first] + v for n, v in new.high.items()},
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=8))
def test_pieces_together_are_the_whole(growth: list[int]) -> None:
    curves, page, step = Curves(["a"]), None, 0
    for more in growth:
        new = range(step + 1, step + more + 1)
        curves.extend(columns(new, [math.sin(n) if n % 3 else math.nan for n in new]))
        step += more
        size, have = (page.size, len(page.steps)) if page else (0, 0)
        page = joined(page, curves.points(range(len(curves)), size, have))
        assert page == curves.points(range(len(curves)))


def test_a_million_steps_are_few_points_and_no_spike_is_lost() -> None:
    curves = Curves(["a"])
    values = np.full(1_000_000, 2.0)
    values[777_776] = 99.0
    curves.extend(columns(range(1, 1_000_001), values))
    points = curves.points(range(len(curves)))
    assert points.size == 512
    assert len(points.steps) == -(-1_000_000 // 512) <= MOST_POINTS
    assert max(v for v in points.high["a"] if v is not None) == 99.0
    close = curves.points(curves.between(777_000, 778_000))
    assert (close.size, close.values["a"][777]) == (1, 99.0)
    again = curves.points(range(len(curves)), points.size, len(points.steps))
    assert len(again.steps) == 1


def test_a_step_is_found_by_its_number_or_the_one_before() -> None:
    curves = Curves(["a"])
    assert curves.place(1) is None
    curves.extend(columns([1, 2, 5], [1.0, 2.0, 5.0], place=100))
    assert [curves.place(step) for step in (0, 1, 4, 5, 9)] == [100, 100, 200, 500, 500]
    assert curves.last("a", 2) == 3.5
