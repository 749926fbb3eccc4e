"""What all learning-rate schedules share: units, warm-up, a final height, and their checks.

Time counts from 1 in the schedule's units, steps or tokens: the first step already learns, time
`warmup` is the first at the peak, time `end` the last. Nothing else enters, so a resumed run has no
schedule state to restore. `lr_factor(0, end)` is where the curve starts: 0 with warm-up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from olm_data.config.convert import Config
from olm_data.config.hints import NonNegativeInt, Proportion
from olm_data.errors import UsageError

PLACE = "train_module.scheduler"


@dataclass(frozen=True, kw_only=True)
class Schedule(Config, ABC):
    """A learning-rate schedule.

    Attributes:
        units: what lengths are counted in, and what the curve runs over.
    """

    units: Literal["steps", "tokens"] = "steps"

    def factor(self, steps: tuple[int, int], tokens: tuple[int, int]) -> float:
        """Return the factor of a step.

        Args:
            steps: the step, from 1, and the steps of the run.
            tokens: tokens trained on after it, and those of the run.

        Raises:
            UsageError: a part of the schedule does not fit into the run.
        """
        return self.lr_factor(*(steps if self.units == "steps" else tokens))

    @abstractmethod
    def lr_factor(self, at: int, end: int) -> float:
        """Return the factor at time `at` (0..end) of a run that ends at `end`, in `units`.

        Raises:
            UsageError: a part of the schedule does not fit into the run.
            ValueError: the time is outside the run.
        """


@dataclass(frozen=True, kw_only=True)
class WithWarmup(Schedule):
    """Linear warm-up from 0 to 1, then `_after`.

    Attributes:
        warmup: length of the warm-up.
        warmup_fraction: the same as a fraction of the run; at most one of the two.
    """

    warmup: NonNegativeInt | None = None
    warmup_fraction: Proportion | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_length("warmup", self.warmup, self.warmup_fraction)

    @property
    def shortest_rest(self) -> int:
        """Time that must be left after the warm-up."""
        return 0

    def warmup_length(self, end: int) -> int:
        """Return the length of the warm-up."""
        return length_of(self.warmup, self.warmup_fraction, end, end - self.shortest_rest)

    def lr_factor(self, at: int, end: int) -> float:
        """Return the factor at time `at`; see `Schedule.lr_factor`."""
        if not 0 <= at <= end:
            raise ValueError(f"{at} is outside a run of {end} {self.units}")
        warmup = self.warmup_length(end)
        must_fit("warm-up", warmup, end - self.shortest_rest, self.units, "warmup_fraction")
        if at < warmup:
            return at / warmup
        return self._after(at, warmup, end)

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

    @property
    def shortest_rest(self) -> int:
        """Time that must be left after the warm-up."""
        return 1


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
    """Raise the UsageError of a field out of range."""
    raise UsageError(f"scheduler.{field}: {what}", where=f"{PLACE}.{field}", fix=fix)
