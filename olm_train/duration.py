"""Durations: how long to train, in steps, tokens, epochs or tokens for each parameter.

An epoch is one pass over the data loader. Of a mixture lock it is the whole schedule, stages and
all; how often a source is repeated inside it was decided by `olm-data mix`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING

from olm_data.config.convert import Config
from olm_data.errors import UsageError
from olm_data.order.steps import StepSizes

if TYPE_CHECKING:
    from olm_train.data.base import DataLoaderBase


class DurationUnit(StrEnum):
    """Units of a duration."""

    steps = "steps"
    """Optimiser steps."""
    tokens = "tokens"
    """Tokens over all ranks; rounded up to whole steps."""
    epochs = "epochs"
    """Passes over the data; a mixture lock is one, its whole schedule."""
    chinchilla = "chinchilla"
    """Multiples of 20 tokens for each parameter, where a training budget is spent best (Hoffmann et
    al., 2022); rounded up to whole steps."""


TOKENS_PER_PARAMETER = 20
"""Of a chinchilla duration of 1."""


@dataclass(frozen=True, kw_only=True)
class Duration(Config):
    """A length of training.

    Attributes:
        value: how many units, a whole number; with `chinchilla`, any number.
        unit: `steps`, `tokens`, `epochs` or `chinchilla`: 20 tokens for each parameter of the
            model.
    """

    value: int | float
    unit: DurationUnit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit is DurationUnit.chinchilla:
            if self.value < 0:
                raise UsageError(f"a duration in chinchilla is 0 or more, not {self.value}")
        elif not (isinstance(self.value, int) and self.value >= 0):
            raise UsageError(f"a duration is a whole number of {self.unit}, not {self.value}")

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
        """Return a duration of `value` passes over the data."""
        return cls(value=value, unit=DurationUnit.epochs)

    @classmethod
    def chinchilla(cls, value: float) -> Duration:
        """Return a duration of `value` times 20 tokens for each parameter."""
        return cls(value=value, unit=DurationUnit.chinchilla)

    def to_steps(self, *, batch_sizes: StepSizes, steps_per_epoch: int, num_params: int) -> int:
        """Return this duration in whole steps, rounded up.

        Args:
            batch_sizes: tokens of each step.
            steps_per_epoch: the steps of a pass over the data.
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
    data_loader: DataLoaderBase,
    num_params: int,
    max_duration: Duration | None,
    hard_stop: Duration | None,
) -> tuple[int, int]:
    """Return the steps of the learning-rate schedule, and the step at which the run ends.

    Raises:
        UsageError: the data hold fewer steps than `max_duration` asks for, or cannot say how many
            steps it is; or ranks cannot share them.
    """
    data_loader.check_sizes(data_loader.batch_sizes.sizes_from[-1][0])
    per_epoch, epochs = data_loader.steps, data_loader.epochs

    def steps_of(duration: Duration) -> int:
        if not duration.value:
            raise UsageError(f"a run is longer than {duration}", where="trainer.max_duration")
        if duration.unit is DurationUnit.epochs and per_epoch is None:
            raise UsageError(
                f"how many steps {duration} are is not known: the data loader does not say how "
                "long an epoch is",
                where="trainer.max_duration",
                why="the learning-rate schedule runs over the steps of the run",
                fix="give Duration.steps(n); the run ends sooner where the data do",
            )
        counts_tokens = duration.unit in (DurationUnit.tokens, DurationUnit.chinchilla)
        if counts_tokens and data_loader.unit != "tokens":
            raise UsageError(
                f"the data loader counts {data_loader.unit}, not tokens",
                where="trainer.max_duration",
                fix="give Duration.steps(n) or Duration.epochs(n)",
            )
        return duration.to_steps(
            batch_sizes=data_loader.batch_sizes,
            steps_per_epoch=per_epoch or 0,
            num_params=num_params,
        )

    wanted = max_duration or Duration.epochs(1)
    steps = steps_of(wanted)
    available = per_epoch if per_epoch is None or epochs is None else per_epoch * epochs
    if per_epoch == 0 or (available is not None and epochs is not None and steps > available):
        locked = data_loader.lock is not None
        raise UsageError(
            f"the run is {max(steps, 1):,} steps long ({wanted}); the "
            f"{'mixture lock' if locked else 'data loader'} holds {available or 0:,}",
            where="trainer.max_duration",
            why="a run takes each row of the lock once" if locked else None,
            fix="shorten it, or give the mixture's last stage more tokens and mix again"
            if locked
            else "shorten it, or give the loader more data",
        )
    if hard_stop is None:
        return steps, steps
    return steps, min(steps, steps_of(hard_stop))
