"""Learning-rate schedules: pure functions of (step, max_steps).

A schedule multiplies the optimiser's peak rate by a factor in [0, 1]. Steps count from 1: the
first step already learns, step `warmup` is the first at the peak, step `max_steps` the last, and
at it the factor is exactly `alpha_f`. Nothing else enters, so a resumed run has no schedule state
to restore. `lr_factor(0, ...)` is where the curve starts: 0 with warm-up.

    factor  1 |    ________________              1 |   /\\__
              |   /                \\               |  /    \\__
      alpha_f |  /                  \\      alpha_f | /        \\___
              +------------------------            +---------------
                 warm-up  stable  decay  (wsd)      warm-up  cosine
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from olm_data.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class _WithWarmup(ABC):
    """Linear warm-up from 0 to 1, then `_after`.

    Attributes:
        warmup_steps: length of the warm-up in steps.
        warmup_fraction: the same as a fraction of the run; at most one of the two.
    """

    _shortest_decay: ClassVar[int] = 0

    warmup_steps: int | None = None
    warmup_fraction: float | None = None

    def __post_init__(self) -> None:
        _one_length("warmup", self.warmup_steps, self.warmup_fraction)

    def warmup(self, max_steps: int) -> int:
        """Length of the warm-up in steps."""
        return _steps(self.warmup_steps, self.warmup_fraction, max_steps)

    def lr_factor(self, step: int, max_steps: int) -> float:
        """The factor at `step` (0..max_steps) of a run of `max_steps` steps.

        Raises:
            UsageError: the warm-up (and decay) do not fit into the run.
            ValueError: the step is outside the run.
        """
        if not 0 <= step <= max_steps:
            raise ValueError(f"step {step} is outside a run of {max_steps} steps")
        warmup = self.warmup(max_steps)
        _must_fit("warm-up", warmup, max_steps - self._shortest_decay, "warmup_fraction")
        if step < warmup:
            return step / warmup
        return self._after(step, warmup, max_steps)

    @abstractmethod
    def _after(self, step: int, warmup: int, max_steps: int) -> float:
        """The factor at `step`, which is not in the warm-up."""


@dataclass(frozen=True, kw_only=True)
class Constant(_WithWarmup):
    """Warm-up, then the peak rate to the end."""

    name: Literal["constant"] = "constant"

    def _after(self, step: int, warmup: int, max_steps: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class _WithFinal(_WithWarmup):
    """A schedule that ends at a fraction of the peak.

    Attributes:
        alpha_f: factor at the last step.
    """

    _shortest_decay: ClassVar[int] = 1

    alpha_f: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.alpha_f <= 1.0:
            raise UsageError(
                f"scheduler.alpha_f: {self.alpha_f!r} is not a fraction of the peak rate",
                where="train_module.scheduler.alpha_f",
                fix="use a number from 0 to 1",
            )


@dataclass(frozen=True, kw_only=True)
class CosineWithWarmup(_WithFinal):
    """Warm-up, then half a cosine down to `alpha_f` (Loshchilov and Hutter, 2017)."""

    name: Literal["cosine_with_warmup"] = "cosine_with_warmup"

    def _after(self, step: int, warmup: int, max_steps: int) -> float:
        done = _progress(step, warmup, max_steps)
        return _between(0.5 * (1 + math.cos(math.pi * done)), self.alpha_f)


@dataclass(frozen=True, kw_only=True)
class Linear(_WithFinal):
    """Warm-up, then a straight line down to `alpha_f`."""

    name: Literal["linear"] = "linear"

    def _after(self, step: int, warmup: int, max_steps: int) -> float:
        return _between(1 - _progress(step, warmup, max_steps), self.alpha_f)


@dataclass(frozen=True, kw_only=True)
class WSD(_WithFinal):
    """Warm-up, stable, linear decay to `alpha_f` (Hu et al., 2024).

    Attributes:
        alpha_f: factor at the last step.
        decay_steps: length of the decay in steps.
        decay_fraction: the same as a fraction of the run. Default, if neither is given: 0.1.
    """

    name: Literal["wsd"] = "wsd"
    alpha_f: float = 0.0
    decay_steps: int | None = None
    decay_fraction: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_length("decay", self.decay_steps, self.decay_fraction)

    def _after(self, step: int, warmup: int, max_steps: int) -> float:
        unset = self.decay_steps is None and self.decay_fraction is None
        decay = _steps(self.decay_steps, 0.1 if unset else self.decay_fraction, max_steps)
        _must_fit("decay", decay, max_steps - warmup, "decay_fraction")
        return _between(1 - _progress(step, max_steps - decay, max_steps), self.alpha_f)


def _steps(steps: int | None, fraction: float | None, max_steps: int) -> int:
    if fraction is not None:
        return math.floor(fraction * max_steps)
    return steps or 0


def _progress(step: int, start: int, end: int) -> float:
    """0 up to `start`, 1 at `end`, linear between; 1 at `end` also where start == end."""
    if step >= end:
        return 1.0
    return max(0, step - start) / (end - start)


def _between(height: float, alpha_f: float) -> float:
    """Scale `height` in [0, 1] to [alpha_f, 1], exact at both ends."""
    return alpha_f + (1.0 - alpha_f) * height if height < 1.0 else 1.0


def _one_length(what: str, steps: int | None, fraction: float | None) -> None:
    where = f"train_module.scheduler.{what}_steps"
    if steps is not None and fraction is not None:
        raise UsageError(
            f"scheduler: both {what}_steps and {what}_fraction are set",
            where=where,
            fix="keep one of them",
        )
    if steps is not None and steps < 0:
        raise UsageError(f"scheduler.{what}_steps: {steps} is negative", where=where)
    if fraction is not None and not 0.0 <= fraction <= 1.0:
        raise UsageError(
            f"scheduler.{what}_fraction: {fraction} is not a fraction of the run",
            where=f"train_module.scheduler.{what}_fraction",
            fix="use a number from 0 to 1",
        )


def _must_fit(what: str, steps: int, room: int, option: str) -> None:
    if steps > room:
        raise UsageError(
            f"scheduler: a {what} of {steps} steps does not fit into the {room} steps left for it",
            where="train_module.scheduler",
            fix=f"train longer, or set {option} instead of a number of steps",
        )
