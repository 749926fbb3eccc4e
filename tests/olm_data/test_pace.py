"""Promises of the sliding window and the forecast: recent speed, and bytes that add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.progress import LEAST_STEP, RateWindow, forecast

steps = st.lists(st.tuples(st.floats(0.001, 5), st.integers(0, 10**9)), min_size=1, max_size=200)


@given(rate=st.floats(0.1, 1e9), gaps=st.lists(st.floats(0.01, 3), min_size=2, max_size=100))
def test_a_steady_amount_has_its_rate_whatever_the_times_of_looking(
    rate: float, gaps: list[float]
) -> None:
    window, now = RateWindow(5), 0.0
    window.add(0.0, 0.0)
    for gap in gaps:
        now += gap
        window.add(now, rate * now)
    assert window.rate == pytest.approx(rate, rel=1e-6)
    assert window.still == 0


@given(steps)
def test_the_rate_is_never_negative_and_memory_is_bounded(steps: list[tuple[float, int]]) -> None:
    window, now = RateWindow(5), 0.0
    for gap, amount in steps:  # amounts fall, too: a worker died and its task began again
        now += gap
        window.add(now, amount)
        assert window.rate >= 0
        assert window.still >= 0
        assert len(window._samples) <= 2 * 5 / LEAST_STEP + 3


def test_only_the_last_seconds_count() -> None:
    window = RateWindow(10)
    for second in range(100):
        window.add(second, 1000 * second if second < 50 else 50_000 + second)
    assert window.rate == pytest.approx(1.0)
    for second in range(100, 130):
        window.add(second, 50_099)
    assert window.rate == 0
    assert window.still == 30


tasks = st.lists(
    st.tuples(st.integers(0, 10**12), st.booleans(), st.integers(0, 10**12)), min_size=1
)


@given(tasks)
def test_a_forecast_is_finite_and_ends_at_nothing_left(
    tasks: list[tuple[int, bool, int]],
) -> None:
    planned, finished, seen = (np.array(column) for column in zip(*tasks, strict=True))
    done, left = forecast(planned, finished, seen)
    assert done >= 0
    assert left >= 0
    assert np.isfinite([done, left]).all()
    assert forecast(planned, np.ones(len(tasks), bool), seen)[1] == 0


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=50), st.floats(0.1, 10))
def test_wrong_guesses_are_scaled_by_the_finished_tasks(planned: list[int], wrong: float) -> None:
    sizes = np.array(planned, np.float64)
    finished = np.arange(len(sizes)) < len(sizes) // 2
    done, left = forecast(sizes, finished, np.where(finished, sizes * wrong, 0))
    assert done + left == pytest.approx(sizes.sum() * wrong)


def test_sources_without_sizes_count_by_tasks() -> None:
    unknown, none = np.zeros(4, np.int64), np.zeros(4, bool)
    assert forecast(unknown, none, np.array([5, 0, 0, 0])) == (0, 4)
    first = np.array([True, False, False, False])
    assert forecast(unknown, first, np.array([100, 50, 0, 0])) == (150, 250)
