"""Durations: how long to train, in steps, tokens or epochs.

An epoch is one pass over the whole schedule of the mixture lock, stages and all; how often a source
is repeated inside it was decided by `olm-data mix`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from olm_data.errors import UsageError
from olm_data.mixture.steps import StepSizes


class DurationUnit(StrEnum):
    """Units of a duration."""

    steps = "steps"
    """Optimiser steps."""
    tokens = "tokens"
    """Tokens over all ranks; rounded up to whole steps."""
    epochs = "epochs"
    """Passes over the whole schedule of the lock."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A length of training.

    Attributes:
        value: how many units, at least 1.
        unit: `steps`, `tokens` or `epochs`.
    """

    value: int
    unit: DurationUnit

    def __post_init__(self) -> None:
        if self.value < 1:
            raise UsageError(f"a duration is at least 1 {self.unit}, not {self.value}")

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

    def to_steps(self, *, batch_sizes: StepSizes, steps_per_epoch: int) -> int:
        """Return this duration in whole steps, rounded up.

        Args:
            batch_sizes: tokens of each step.
            steps_per_epoch: the steps that the lock's schedule holds.
        """
        if self.unit is DurationUnit.steps:
            return self.value
        if self.unit is DurationUnit.tokens:
            return batch_sizes.steps_to(self.value)
        return self.value * steps_per_epoch

    def __str__(self) -> str:
        unit = self.unit.value
        return f"{self.value:,} {unit if self.value != 1 else unit.removesuffix('s')}"
