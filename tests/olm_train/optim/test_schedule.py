"""Learning-rate schedules."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_train.optim.schedule import (
    WSD,
    WSDS,
    Constant,
    CosineWithWarmup,
    CosineWithWarmupAndLinearDecay,
    Exponential,
    InvSqrt,
    Linear,
    Power,
    Sequential,
)
from olm_train.optim.schedule_base import LRSchedule, Position

TO_ALPHA_F = [Linear, CosineWithWarmup, Exponential, WSD, CosineWithWarmupAndLinearDecay, Power]
SMOOTH = [*TO_ALPHA_F, InvSqrt]


@st.composite
def runs(draw: st.DrawFn) -> tuple[LRSchedule, int, int]:
    """(schedule, its warm-up in steps, steps of the run)."""
    max_steps = draw(st.integers(20, 3000))
    warmup = draw(st.integers(0, max_steps // 2))
    options: dict[str, float] = {"warmup": warmup}
    if draw(st.booleans()):
        options = {"warmup_fraction": warmup / max_steps}
        warmup = round(warmup / max_steps * max_steps)
    kind = draw(st.sampled_from([Constant, *SMOOTH]))
    if kind is not Constant:
        options["alpha_f"] = draw(st.floats(1e-6, 1))
    if issubclass(kind, WSD | CosineWithWarmupAndLinearDecay | Power):
        options["decay_fraction"] = draw(st.floats(0.05, 0.5))
    if kind is CosineWithWarmupAndLinearDecay:
        options["cosine_alpha_f"] = draw(st.floats(options["alpha_f"], 1))
    return kind(**options), warmup, max_steps  # type: ignore[arg-type]


@given(runs())
def test_it_rises_strictly_to_the_peak_and_never_again_and_ends_at_alpha_f(
    run: tuple[LRSchedule, int, int],
) -> None:
    schedule, warmup, max_steps = run
    factors = [schedule.lr_factor(t, max_steps) for t in range(max_steps + 1)]
    rise, fall = factors[: warmup + 1], factors[warmup:]
    assert rise == sorted(set(rise))
    assert rise[-1] == 1.0
    assert not warmup or rise[0] == 0.0
    assert fall == sorted(fall, reverse=True)
    assert fall[-1] >= 0.0
    if not isinstance(schedule, InvSqrt):  # it knows no end
        assert fall[-1] == getattr(schedule, "alpha_f", 1.0)


@given(runs())
def test_no_step_jumps(run: tuple[LRSchedule, int, int]) -> None:
    schedule, warmup, max_steps = run
    assume(isinstance(schedule, Constant | CosineWithWarmup | Linear | WSD))  # a known steepness
    factors = [schedule.lr_factor(t, max_steps) for t in range(max_steps + 1)]
    shortest = min(
        warmup or max_steps,
        round(schedule.decay_fraction * max_steps)
        if isinstance(schedule, WSD) and schedule.decay_fraction
        else max_steps - warmup,
    )
    assume(shortest > 0)
    steepest = max(abs(b - a) for a, b in itertools.pairwise(factors))
    assert steepest <= math.pi / 2 / shortest + 1e-9


@given(runs(), st.randoms())
def test_a_factor_depends_on_nothing_asked_before(run: tuple[LRSchedule, int, int], random) -> None:  # type: ignore[no-untyped-def]
    schedule, _, max_steps = run
    steps = list(range(0, max_steps + 1, 7))
    in_order = {t: schedule.lr_factor(t, max_steps) for t in steps}
    random.shuffle(steps)
    assert {t: schedule.lr_factor(t, max_steps) for t in steps} == in_order


def test_known_values() -> None:
    cosine = CosineWithWarmup(warmup=10, alpha_f=0.1)
    assert cosine.lr_factor(5, 110) == 0.5
    assert cosine.lr_factor(60, 110) == pytest.approx(0.55)
    linear = Linear(warmup_fraction=0.1, alpha_f=0.0)
    assert linear.lr_factor(55, 100) == pytest.approx(0.5)
    wsd = WSD(warmup=10, decay=20)
    assert [wsd.lr_factor(t, 100) for t in (10, 50, 80, 90, 100)] == [1, 1, 1, 0.5, 0]
    assert WSD().lr_factor(95, 100) == 0.5  # a tenth of the run by default
    assert [WSD(decay=0).lr_factor(t, 9) for t in (1, 8, 9)] == [1, 1, 0]
    assert CosineWithWarmup(warmup_fraction=0.1, alpha_f=0.2).lr_factor(1, 1) == 0.2
    assert Constant(warmup=4).lr_factor(3, 100) == 0.75
    cut = CosineWithWarmupAndLinearDecay(decay=50, cosine_alpha_f=0.1)
    assert cut.lr_factor(50, 100) == pytest.approx(0.55)
    assert cut.lr_factor(75, 100) == pytest.approx(0.275)
    assert Exponential(alpha_f=0.01).lr_factor(50, 100) == pytest.approx(0.1)
    assert InvSqrt(warmup=25, alpha_f=0.0).lr_factor(100, 1000) == 0.5
    assert Power(warmup=10, exponent=-0.5, decay=10).lr_factor(40, 100) == 0.5
    assert Power(warmup=10, exponent=-0.5, decay=10).lr_factor(95, 100) == pytest.approx(1 / 6)


@given(st.integers(20, 500), st.integers(1, 500), st.sampled_from([InvSqrt, Power]))
def test_a_longer_run_goes_on_where_a_shorter_one_stopped(
    end: int, more: int, kind: type[InvSqrt] | type[Power]
) -> None:
    schedule = kind(warmup=5) if kind is InvSqrt else kind(warmup=5, decay=3)
    shared = range(end - 3)
    assert [schedule.lr_factor(t, end) for t in shared] == [
        schedule.lr_factor(t, end + more) for t in shared
    ]


@given(st.lists(st.integers(10, 200), max_size=4), st.integers(1, 200), st.integers(0, 8))
def test_each_period_of_wsd_s_is_at_the_peak_and_ends_decayed(
    periods: list[int], rest: int, warmup: int
) -> None:
    schedule = WSDS(warmup=warmup, decay_fraction=0.2, period_lengths=periods, alpha_f=0.05)
    end = sum(periods) + max(rest, 2 * warmup + 1)
    ends = [*itertools.accumulate(periods), end]
    for start, stop in itertools.pairwise([0, *ends]):
        assert schedule.lr_factor(stop, end) == 0.05
        first = max(start, warmup) + 1
        if first <= stop - max(1, (stop - start) // 5):
            assert schedule.lr_factor(first, end) == 1.0
    assert all(0.05 <= schedule.lr_factor(t, end) <= 1 for t in range(warmup + 1, end + 1))


@given(st.integers(1, 300), st.integers(1, 300))
def test_each_part_of_a_sequence_is_a_run_of_its_own(first: int, second: int) -> None:
    parts = [Linear(alpha_f=0.5), CosineWithWarmup(alpha_f=0.1)]
    schedule = Sequential(schedulers=parts, lengths=[first])
    end = first + second
    assert [schedule.lr_factor(t, end) for t in range(1, end + 1)] == [
        *(parts[0].lr_factor(t, first) for t in range(1, first + 1)),
        *(0.5 * parts[1].lr_factor(t, second) for t in range(1, second + 1)),
    ]


@given(st.lists(st.integers(3, 60), min_size=1, max_size=4), st.integers(3, 60))
def test_a_sequence_never_jumps_up(lengths: list[int], rest: int) -> None:
    kinds = [Linear(alpha_f=0.5), WSD(alpha_f=0.7), CosineWithWarmup(), Exponential(), Constant()]
    schedule = Sequential(schedulers=kinds[: len(lengths) + 1], lengths=lengths)
    end = sum(lengths) + rest
    rates = [schedule.lr_factor(t, end) for t in range(1, end + 1)]
    assert rates == sorted(rates, reverse=True)


def test_a_part_of_a_sequence_that_would_stay_at_zero_is_refused() -> None:
    schedule = Sequential(schedulers=[WSD(), Linear()], lengths=[10])
    assert schedule.lr_factor(10, 20) == 0.0
    with pytest.raises(UsageError, match="number 1, wsd, ends at a rate of 0"):
        schedule.lr_factor(11, 20)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Exponential, {"alpha_f": 0.0}),
        (Power, {"exponent": 0.5}),
        (CosineWithWarmupAndLinearDecay, {"alpha_f": 0.2, "cosine_alpha_f": 0.1}),
        (WSDS, {"period_lengths": [10, 0]}),
        (Linear, {"units": "epochs"}),
        (Sequential, {"schedulers": []}),
        (Sequential, {"schedulers": [Linear(), Linear()]}),
        (Sequential, {"schedulers": [Linear(), Linear()], "lengths": [0]}),
        (Sequential, {"schedulers": [Linear(units="tokens")]}),
        (WSD, {"warmup": 5, "warmup_fraction": 0.1}),
        (WSD, {"warmup": -1}),
        (WSD, {"warmup_fraction": 1.5}),
        (WSD, {"alpha_f": 1.1}),
        (WSD, {"alpha_f": float("nan")}),
        (WSD, {"decay": 5, "decay_fraction": 0.1}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(
    kind: type[LRSchedule], options: dict[str, object]
) -> None:
    with pytest.raises(UsageError, match="|".join([*options, "schedulers"])):
        kind(**options)  # type: ignore[arg-type]


def position(step: int, max_steps: int, tokens: int, max_tokens: int) -> Position:
    return Position(step=step, max_steps=max_steps, tokens=tokens, max_tokens=max_tokens)


@given(st.integers(1, 5000), st.floats(0, 0.5), st.floats(0, 0.5))
def test_fractions_round_as_olmo_core_rounds_them(end: int, warmup: float, decay: float) -> None:
    schedule = WSD(warmup_fraction=warmup, decay_fraction=decay)
    length = schedule.warmup_length(end)
    assert length == round(end * warmup) or length == end - 1
    room = end - length
    assert schedule.decay_length(end, room) in (round(end * decay), room)
    schedule.lr_factor(end, end)  # fits, whatever is rounded up


@pytest.mark.parametrize(
    ("end", "warmup", "decay", "expected"),
    [
        (105, 0.1, 0.1, (10, 10)),
        (107, 0.1, 0.1, (11, 11)),
        (25, 0.5, 0.1, (12, 2)),
        (7, 0.5, 0.5, (4, 3)),
    ],
)
def test_known_roundings(end: int, warmup: float, decay: float, expected: tuple[int, int]) -> None:
    schedule = WSD(warmup_fraction=warmup, decay_fraction=decay)
    length = schedule.warmup_length(end)
    assert (length, schedule.decay_length(end, end - length)) == expected


def test_a_schedule_in_tokens_does_not_look_at_steps() -> None:
    schedule = Linear(units="tokens", warmup=1000, alpha_f=0.0)
    assert schedule.factor(position(1, 2, 500, 11_000)) == 0.5
    assert schedule.factor(position(2, 2, 6000, 11_000)) == 0.5
    assert Linear(warmup=2).factor(position(1, 4, 6000, 11_000)) == 0.5


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (CosineWithWarmup(warmup=100), "warm-up of 100 steps"),
        (WSD(warmup=50, decay=60), "decay of 60 steps"),
        (WSDS(period_lengths=[100, 50]), "150 steps long together; the run is 100"),
        (
            Sequential(schedulers=[Linear(), Linear()], lengths=[100]),
            "100 steps long together; the run is 100",
        ),
    ],
)
def test_parts_that_do_not_fit_into_the_run_are_refused_with_numbers(
    schedule: LRSchedule, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        schedule.lr_factor(50, 100)
    with pytest.raises(ValueError, match="101 is outside"):
        schedule.lr_factor(101, 100)
