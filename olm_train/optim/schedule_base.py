"""What all learning-rate schedules share: units, warm-up, final decay, and their checks.

Time counts from 1 in the schedule's units: the first step already learns, time `warmup` is the
first at the peak, time `end` the last. Nothing else enters, so a resumed run has no schedule state
to restore. `lr_factor(0, end)` is where the curve starts: 0 with warm-up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from olm_data.config.convert import Config
from olm_data.config.hints import NonNegativeInt, Proportion
from olm_data.errors import UsageError

PLACE = "train_module.scheduler"


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run is.

    Attributes:
        step, max_steps: a step, from 1, and the steps of the run.
        tokens, max_tokens: trained on after that step, and in the whole run.
    """

    step: int
    max_steps: int
    tokens: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class LRSchedule(Config, ABC):
    """A learning-rate schedule.

    Attributes:
        units: what lengths are counted in, and what the curve runs over.
    """

    units: Literal["steps", "tokens"] = "steps"

    def factor(self, position: Position) -> float:
        """Return the factor of a step; raises as `lr_factor` does."""
        if self.units == "steps":
            return self.lr_factor(position.step, position.max_steps)
        return self.lr_factor(position.tokens, position.max_tokens)

    def lr_factor(self, at: int, end: int) -> float:
        """Return the factor at time `at` (0..end) of a run that ends at `end`, in `units`.

        Raises:
            UsageError: a part of the schedule does not fit into the run.
            ValueError: the time is outside the run.
        """
        if not 0 <= at <= end:
            raise ValueError(f"{at} is outside a run of {end} {self.units}")
        return self._factor(at, end)

    @abstractmethod
    def _factor(self, at: int, end: int) -> float: ...


@dataclass(frozen=True, kw_only=True)
class WithWarmup(LRSchedule):
    """Linear warm-up from 0 to 1, then `_after`.

    Attributes:
        warmup: length of the warm-up.
        warmup_fraction: the same as a fraction of the run; at most one of the two.
    """

    warmup: NonNegativeInt | None = None
    warmup_fraction: Proportion | None = None

    shortest_rest: ClassVar[int] = 0
    """Time that must be left after the warm-up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_length("warmup", self.warmup, self.warmup_fraction)

    def warmup_length(self, end: int) -> int:
        """Return the length of the warm-up."""
        return length_of(self.warmup, self.warmup_fraction, end, end - self.shortest_rest)

    def _factor(self, at: int, end: int) -> float:
        warmup = self.warmup_length(end)
        must_fit("warm-up", warmup, end - self.shortest_rest, self.units, "warmup_fraction")
        return at / warmup if at < warmup else self._after(at, warmup, end)

    @abstractmethod
    def _after(self, at: int, warmup: int, end: int) -> float:
        """Return the factor at `at`, which is not in the warm-up."""


@dataclass(frozen=True, kw_only=True)
class WithFinal(WithWarmup):
    """A schedule with a lowest height.

    Attributes:
        alpha_f: lowest rate as a fraction of the peak.
    """

    alpha_f: Proportion = 0.1

    shortest_rest: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class WithDecay(WithFinal):
    """A schedule whose end is a straight line down to `alpha_f`.

    Attributes:
        alpha_f: lowest rate, at the end, as a fraction of the peak.
        decay: length of the linear decay at the end (`wsd_s`: of each period).
        decay_fraction: the same as a fraction of the run. Default, if neither is given: 0.1.
    """

    alpha_f: Proportion = 0.0
    decay: NonNegativeInt | None = None
    decay_fraction: Proportion | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_length("decay", self.decay, self.decay_fraction)

    def decay_length(self, end: int, room: int) -> int:
        """Return the length of the decay of a run or period of length `end` with `room` for it."""
        unset = self.decay is None and self.decay_fraction is None
        return length_of(self.decay, 0.1 if unset else self.decay_fraction, end, room)

    def _after(self, at: int, warmup: int, end: int) -> float:
        decay = self.decay_length(end, end - warmup)
        must_fit("decay", decay, end - warmup, self.units, "decay_fraction")
        start = end - decay
        high = self._before(min(at, start), warmup, end)
        return between(1 - progress(at, start, end), self.alpha_f, high)

    def _before(self, at: int, warmup: int, end: int) -> float:
        """Return the factor at `at`, after the warm-up and not after the decay's start."""
        return 1.0


class LRScaling(StrEnum):
    """What the rate of a step is multiplied with where the batch grows during a run."""

    none = "none"
    """1: the schedule alone decides."""
    sqrt = "sqrt"
    """The root of the growth of the batch, for Adam and its kin (Malladi et al. 2022)."""
    linear = "linear"
    """The growth of the batch, for plain gradient descent (Goyal et al. 2017)."""

    def factor(self, growth: float) -> float:
        """Return the factor for a batch `growth` times as large as the first one."""
        return growth ** {LRScaling.none: 0.0, LRScaling.sqrt: 0.5, LRScaling.linear: 1.0}[self]


def length_of(length: int | None, fraction: float | None, end: int, room: int) -> int:
    """Return a length given as it is, or as a fraction of a run; 0 for neither.

    A fraction is rounded to the nearest whole number, halves to the even one, as OLMo-core does;
    down where rounding up alone would go beyond the room for it.
    """
    if fraction is None:
        return length or 0
    nearest, least = round(fraction * end), math.floor(fraction * end)
    return least if least <= room < nearest else nearest


def progress(at: int, start: int, end: int) -> float:
    """Return 0 up to `start`, 1 at `end`, linear between; 1 at `end` also where start == end."""
    if at >= end:
        return 1.0
    return (at - start) / (end - start) if at > start else 0.0


def between(height: float, low: float, high: float = 1.0) -> float:
    """Scale `height` in [0, 1] to [low, high], exact at both ends."""
    return low + (high - low) * height if height < 1.0 else high


def one_length(what: str, length: int | None, fraction: float | None) -> None:
    """Refuse a length that is given twice."""
    if length is not None and fraction is not None:
        refuse(what, f"both {what} and {what}_fraction are set", "keep one of them")


def must_fit(what: str, length: int, room: int, units: str, option: str) -> None:
    """Refuse a part of a schedule that is longer than the room for it."""
    if length > room:
        raise UsageError(
            f"scheduler: a {what} of {length:,} {units} does not fit into the {max(room, 0):,} "
            f"{units} left for it",
            where=PLACE,
            fix=f"train longer, or set {option} instead of a number of {units}",
        )


def refuse(field: str, what: str, fix: str | None = None) -> None:
    """Raise the UsageError of a field that does not go with the others."""
    raise UsageError(what, where=field, fix=fix)


def refuse_for_run(field: str, what: str, fix: str) -> None:
    """Raise the UsageError of a field that does not go with the length of the run."""
    raise UsageError(f"scheduler.{field}: {what}", where=f"{PLACE}.{field}", fix=fix)
