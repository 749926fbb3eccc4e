"""What schedules share: lengths and their rounding, units, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_train.optim.schedule import WSD, CosineWithWarmup, Linear
from olm_train.optim.schedule_base import Position


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


def test_a_single_step_run_is_legal() -> None:
    assert CosineWithWarmup(warmup_fraction=0.1, alpha_f=0.2).lr_factor(1, 1) == 0.2


@pytest.mark.parametrize(
    "options",
    [
        {"warmup": 5, "warmup_fraction": 0.1},
        {"warmup": -1},
        {"warmup_fraction": 1.5},
        {"alpha_f": 1.1},
        {"alpha_f": float("nan")},
        {"decay": 5, "decay_fraction": 0.1},
    ],
    ids=str,
)
def test_contradictory_or_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        WSD(**options)  # type: ignore[arg-type]


def test_lengths_that_do_not_fit_into_the_run_are_refused_with_numbers() -> None:
    with pytest.raises(UsageError, match="warm-up of 100 steps"):
        CosineWithWarmup(warmup=100).lr_factor(1, 100)
    with pytest.raises(UsageError, match="decay of 60 steps"):
        WSD(warmup=50, decay=60).lr_factor(50, 100)
    with pytest.raises(ValueError, match="101 is outside"):
        Linear().lr_factor(101, 100)
