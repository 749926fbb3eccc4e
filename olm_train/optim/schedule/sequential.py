"""Schedules one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from olm_data.config.hints import PositiveInt
from olm_train.optim.schedule.base import Schedule, refuse
from olm_train.optim.schedule.falling import (
    Constant,
    CosineWithWarmup,
    Exponential,
    InvSqrt,
    Linear,
)
from olm_train.optim.schedule.with_decay import WSD, WSDS, CosineWithWarmupAndLinearDecay, Power

Simple = (
    CosineWithWarmup
    | WSD
    | WSDS
    | CosineWithWarmupAndLinearDecay
    | Linear
    | Exponential
    | InvSqrt
    | Power
    | Constant
)


@dataclass(frozen=True, kw_only=True)
class Sequential(Schedule):
    """Schedules one after the other, each as if its part were a run of its own.

    The peak of each is the rate at which the one before ended, so the rate never jumps up.

    Attributes:
        schedulers: at least one, in the units of the whole; one after the other, each as if its
            part were a run of its own, with the last rate of the one before for its peak.
        lengths: length of each but the last, which runs to the end.
    """

    name: Literal["sequential"] = "sequential"
    schedulers: list[Simple] = field(default_factory=list)
    lengths: list[PositiveInt] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.schedulers:
            refuse("schedulers", "there is none", "list them: [{name: linear}, ...]")
        if len(self.lengths) != len(self.schedulers) - 1:
            refuse(
                "lengths",
                f"{len(self.lengths)} for {len(self.schedulers)} schedulers",
                "give one for each but the last",
            )
        if any(part.units != self.units for part in self.schedulers):
            refuse("units", f"not all schedulers count {self.units}", "give all the same units")

    def lr_factor(self, at: int, end: int) -> float:
        """Return the factor at time `at`; see `Schedule.lr_factor`."""
        if not 0 <= at <= end:
            raise ValueError(f"{at} is outside a run of {end} {self.units}")
        starts = [0, *accumulate(self.lengths)]
        if starts[-1] >= end:
            refuse(
                "lengths",
                f"they are {starts[-1]:,} {self.units} long together; the run is {end:,}",
                "train longer, or give shorter lengths",
            )
        # the last time of a part belongs to it
        part = max(i for i, start in enumerate(starts) if start < max(at, 1))
        stop = starts[part + 1] if part + 1 < len(starts) else end
        peak = 1.0
        for number, (before, length) in enumerate(zip(self.schedulers, self.lengths, strict=False)):
            if number == part:
                break
            peak *= before.lr_factor(length, length)
            if peak == 0.0:
                refuse(
                    "schedulers",
                    f"number {number + 1}, {before.name}, ends at a rate of 0, and the one after "
                    "it would stay there",
                    "give it an alpha_f above 0",
                )
        return peak * self.schedulers[part].lr_factor(at - starts[part], stop - starts[part])
