"""Durations in steps, tokens and epochs come out in whole steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_data.mixture.steps import StepSizes
from olm_train.duration import Duration, DurationUnit


@given(st.integers(1, 10**15), st.integers(1, 10**9))
def test_tokens_round_up_to_whole_steps(tokens: int, batch: int) -> None:
    steps = Duration.tokens(tokens).to_steps(
        batch_sizes=StepSizes.constant(batch), steps_per_epoch=1
    )
    assert (steps - 1) * batch < tokens <= steps * batch


def test_steps_and_epochs_are_exact() -> None:
    assert Duration.steps(7).to_steps(batch_sizes=StepSizes.constant(10), steps_per_epoch=3) == 7
    assert Duration.epochs(2).to_steps(batch_sizes=StepSizes.constant(10), steps_per_epoch=3) == 6


@pytest.mark.parametrize("value", [0, -1])
def test_an_empty_duration_is_refused(value: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Duration(value=value, unit=DurationUnit.steps)


def test_a_duration_reads_as_a_sentence() -> None:
    assert str(Duration.steps(1)) == "1 step"
    assert str(Duration.tokens(20_000)) == "20,000 tokens"
