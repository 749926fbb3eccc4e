"""Durations in steps, tokens, epochs and tokens for each parameter come out in whole steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_data.order.steps import StepSizes
from olm_train.duration import Duration, DurationUnit


def steps_of(duration: Duration, *, batch: int = 10, epoch: int = 3, num_params: int = 7) -> int:
    return duration.to_steps(
        batch_sizes=StepSizes.constant(batch), steps_per_epoch=epoch, num_params=num_params
    )


@given(st.integers(1, 10**15), st.integers(1, 10**9))
def test_tokens_round_up_to_whole_steps(tokens: int, batch: int) -> None:
    steps = steps_of(Duration.tokens(tokens), batch=batch)
    assert (steps - 1) * batch < tokens <= steps * batch


def test_steps_and_epochs_are_exact() -> None:
    assert steps_of(Duration.steps(7)) == 7
    assert steps_of(Duration.epochs(2)) == 6


@given(st.integers(1, 10**12), st.integers(1, 10**9), st.sampled_from([0.5, 1, 2.5, 10]))
def test_chinchilla_is_twenty_tokens_for_each_parameter(
    num_params: int, batch: int, multiple: float
) -> None:
    steps = steps_of(Duration.chinchilla(multiple), batch=batch, num_params=num_params)
    assert steps == math.ceil(math.ceil(num_params * int(multiple * 20)) / batch)


@pytest.mark.parametrize("unit", ["steps", "tokens", "epochs"])
@pytest.mark.parametrize("value", [-1, 1.5])
def test_a_duration_that_is_negative_or_not_whole_is_refused(value: float, unit: str) -> None:
    with pytest.raises(UsageError, match="is a whole number of"):
        Duration(value=value, unit=DurationUnit(unit))


@pytest.mark.parametrize("value", [-0.5, math.inf, math.nan])
def test_a_negative_or_endless_multiple_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match=r"0 or more|a number, not"):
        Duration.chinchilla(value)


def test_a_duration_reads_as_a_sentence() -> None:
    assert str(Duration.steps(1)) == "1 step"
    assert str(Duration.tokens(20_000)) == "20,000 tokens"
    assert str(Duration.chinchilla(0.5)) == "10 tokens a parameter"
