"""Schedules: pure, bounded, continuous, warm up monotonically and end where they say."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_train.optim.schedule import WSD, Constant, CosineWithWarmup, Linear

Schedule = Constant | CosineWithWarmup | Linear | WSD


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """(schedule, its warm-up in steps, steps of the run)."""
    max_steps = draw(st.integers(20, 3000))
    warmup = draw(st.integers(0, max_steps // 2))
    options: dict[str, float] = {"warmup_steps": warmup}
    if draw(st.booleans()):
        options = {"warmup_fraction": warmup / max_steps}
        warmup = math.floor(warmup / max_steps * max_steps)
    kind = draw(st.sampled_from([Constant, CosineWithWarmup, Linear, WSD]))
    if kind is not Constant:
        options["alpha_f"] = draw(st.floats(0, 1))
    if kind is WSD:
        options["decay_fraction"] = draw(st.floats(0.05, 0.5))
    return kind(**options), warmup, max_steps  # type: ignore[arg-type]


@given(runs())
def test_factor_stays_between_zero_and_the_peak(run: tuple[Schedule, int, int]) -> None:
    schedule, _, max_steps = run
    assert all(0.0 <= schedule.lr_factor(t, max_steps) <= 1.0 for t in range(max_steps + 1))


@given(runs())
def test_warm_up_rises_strictly_from_zero_to_one(run: tuple[Schedule, int, int]) -> None:
    schedule, warmup, max_steps = run
    rise = [schedule.lr_factor(t, max_steps) for t in range(warmup + 1)]
    assert rise == sorted(set(rise))
    assert rise[-1] == 1.0
    if warmup:
        assert rise[0] == 0.0
        assert schedule.lr_factor(1, max_steps) > 0


@given(runs())
def test_after_the_warm_up_it_never_rises(run: tuple[Schedule, int, int]) -> None:
    schedule, warmup, max_steps = run
    fall = [schedule.lr_factor(t, max_steps) for t in range(warmup, max_steps + 1)]
    assert fall == sorted(fall, reverse=True)


@given(runs())
def test_the_last_step_is_exactly_at_alpha_f(run: tuple[Schedule, int, int]) -> None:
    schedule, _, max_steps = run
    expected = 1.0 if isinstance(schedule, Constant) else schedule.alpha_f
    assert schedule.lr_factor(max_steps, max_steps) == expected


@given(runs())
def test_no_step_jumps(run: tuple[Schedule, int, int]) -> None:
    schedule, warmup, max_steps = run
    factors = [schedule.lr_factor(t, max_steps) for t in range(max_steps + 1)]
    shortest = min(
        warmup or max_steps,
        math.floor(schedule.decay_fraction * max_steps)
        if isinstance(schedule, WSD) and schedule.decay_fraction
        else max_steps - warmup,
    )
    assume(shortest > 0)
    steepest = max(abs(b - a) for a, b in itertools.pairwise(factors))
    assert steepest <= math.pi / 2 / shortest + 1e-9


@given(runs(), st.randoms())
def test_a_factor_depends_on_nothing_asked_before(run: tuple[Schedule, int, int], random) -> None:  # type: ignore[no-untyped-def]
    schedule, _, max_steps = run
    steps = list(range(0, max_steps + 1, 7))
    in_order = {t: schedule.lr_factor(t, max_steps) for t in steps}
    random.shuffle(steps)
    assert {t: schedule.lr_factor(t, max_steps) for t in steps} == in_order


def test_known_values() -> None:
    cosine = CosineWithWarmup(warmup_steps=10, alpha_f=0.1)
    assert cosine.lr_factor(5, 110) == 0.5
    assert cosine.lr_factor(60, 110) == pytest.approx(0.55)
    linear = Linear(warmup_fraction=0.1, alpha_f=0.0)
    assert linear.lr_factor(55, 100) == pytest.approx(0.5)
    wsd = WSD(warmup_steps=10, decay_steps=20)
    assert [wsd.lr_factor(t, 100) for t in (10, 50, 80, 90, 100)] == [1, 1, 1, 0.5, 0]
    assert WSD().lr_factor(95, 100) == 0.5  # a tenth of the run by default
    assert Constant(warmup_steps=4).lr_factor(3, 100) == 0.75


def test_a_single_step_run_is_legal() -> None:
    assert CosineWithWarmup(warmup_fraction=0.1, alpha_f=0.2).lr_factor(1, 1) == 0.2


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_steps": 5, "warmup_fraction": 0.1},
        {"warmup_steps": -1},
        {"warmup_fraction": 1.5},
        {"alpha_f": 1.1},
        {"alpha_f": float("nan")},
        {"decay_steps": 5, "decay_fraction": 0.1},
    ],
    ids=str,
)
def test_contradictory_or_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        WSD(**options)  # type: ignore[arg-type]


def test_lengths_that_do_not_fit_into_the_run_are_refused_with_numbers() -> None:
    with pytest.raises(UsageError, match="warm-up of 100 steps"):
        CosineWithWarmup(warmup_steps=100).lr_factor(1, 100)
    with pytest.raises(UsageError, match="decay of 60 steps"):
        WSD(warmup_steps=50, decay_steps=60).lr_factor(50, 100)
    with pytest.raises(ValueError, match="step 101"):
        Linear().lr_factor(101, 100)
