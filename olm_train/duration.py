"""Durations: how long to train, in steps, tokens, epochs or tokens for each parameter.

An epoch is one pass over the whole schedule of the mixture lock, stages and all; how often a source
is repeated inside it was decided by `olm-data mix`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING

from olm_data.errors import UsageError
from olm_data.order.steps import StepSizes

if TYPE_CHECKING:
    from olm_train.data.loader import DataLoader


class DurationUnit(StrEnum):
    """Units of a duration."""

    steps = "steps"
    """Optimiser steps."""
    tokens = "tokens"
    """Tokens over all ranks; rounded up to whole steps."""
    epochs = "epochs"
    """Passes over the whole schedule of the lock."""
    chinchilla = "chinchilla"
    """Multiples of 20 tokens for each parameter, where a training budget is spent best (Hoffmann et
    al., 2022); rounded up to whole steps."""


TOKENS_PER_PARAMETER = 20
"""Of a chinchilla duration of 1."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A length of training.

    Attributes:
        value: how many units, at least 1; with `chinchilla`, any number above 0.
        unit: `steps`, `tokens`, `epochs` or `chinchilla`: 20 tokens for each parameter of the
            model.
    """

    value: int | float
    unit: DurationUnit

    def __post_init__(self) -> None:
        if self.unit is DurationUnit.chinchilla:
            if not 0 < self.value < math.inf:
                raise UsageError(f"a duration in chinchilla is above 0, not {self.value}")
        elif not (isinstance(self.value, int) and self.value >= 1):
            raise UsageError(f"a duration is at least 1 whole {self.unit}, not {self.value}")

    @classmethod
    def steps(cls, value: int) -> Duration:
        """Return a duration of `value` steps."""
        return cls(value=value, unit=DurationUnit.steps)

    @classmethod
    def tokens(cls, value: int) -> Duration:
        """Return a duration of `value` tokens."""
        return cls(value=value, unit=DurationUnit.tokens)

    @classmethod
    def epochs(cls, value: int) -> Duration:
        """Return a duration of `value` passes over the lock's schedule."""
        return cls(value=value, unit=DurationUnit.epochs)

    @classmethod
    def chinchilla(cls, value: float) -> Duration:
        """Return a duration of `value` times 20 tokens for each parameter."""
        return cls(value=value, unit=DurationUnit.chinchilla)

    def to_steps(self, *, batch_sizes: StepSizes, steps_per_epoch: int, num_params: int) -> int:
        """Return this duration in whole steps, rounded up.

        Args:
            batch_sizes: tokens of each step.
            steps_per_epoch: the steps that the lock's schedule holds.
            num_params: parameters of the model.
        """
        if self.unit is DurationUnit.chinchilla:
            tokens = Fraction(self.value) * TOKENS_PER_PARAMETER * num_params
            return batch_sizes.steps_to(math.ceil(tokens))
        assert isinstance(self.value, int)
        if self.unit is DurationUnit.steps:
            return self.value
        if self.unit is DurationUnit.tokens:
            return batch_sizes.steps_to(self.value)
        return self.value * steps_per_epoch

    def __str__(self) -> str:
        unit = self.unit.value
        if self.unit is DurationUnit.chinchilla:
            return f"{self.value * TOKENS_PER_PARAMETER:,g} tokens a parameter"
        return f"{self.value:,} {unit if self.value != 1 else unit.removesuffix('s')}"


def run_length(
    data_loader: DataLoader,
    num_params: int,
    max_duration: Duration | None,
    hard_stop: Duration | None,
) -> tuple[int, int]:
    """Return the steps of the learning-rate schedule, and the step at which the run ends.

    Raises:
        UsageError: the lock holds fewer steps than `max_duration` asks for.
    """
    available = data_loader.steps

    def steps_of(duration: Duration) -> int:
        return duration.to_steps(
            batch_sizes=data_loader.batch_sizes, steps_per_epoch=available, num_params=num_params
        )

    wanted = max_duration or Duration.epochs(1)
    steps = steps_of(wanted)
    if steps > available or not available:
        raise UsageError(
            f"the run is {max(steps, 1):,} steps long ({wanted}); the mixture lock holds "
            f"{available:,}",
            where="trainer.max_duration",
            why="a run takes each row of the lock once",
            fix="shorten it, or give the mixture's last stage more tokens and mix again",
        )
    if hard_stop is None:
        return steps, steps
    return steps, min(steps, steps_of(hard_stop))
