"""Learning-rate schedules: pure functions of how far a run is, counted in steps or in tokens.

A schedule multiplies the optimiser's peak rate by a factor in [0, 1].

    factor  1 |    ________________              1 |   /\\__               1 |  _____  ____
              |   /                \\               |  /    \\__              | /     \\|    \\
      alpha_f |  /                  \\      alpha_f | /        \\___  alpha_f |/            \\
              +------------------------            +---------------        +----------------
                 warm-up  stable  decay  (wsd)      warm-up  cosine          wsd_s, two periods
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Literal

from msgspec import Meta

from olm_data.config.hints import PositiveInt
from olm_train.optim.schedule_base import (
    LRSchedule,
    WithDecay,
    WithFinal,
    WithWarmup,
    between,
    progress,
    refuse,
    refuse_for_run,
)

_NEVER_0 = "an exponential never reaches 0; a line does: name: linear"


@dataclass(frozen=True, kw_only=True)
class Constant(WithWarmup):
    """Warm-up, then the peak rate to the end."""

    name: Literal["constant"] = "constant"

    def _after(self, at: int, warmup: int, end: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class CosineWithWarmup(WithFinal):
    """Warm-up, then half a cosine down to `alpha_f` (Loshchilov and Hutter, 2017)."""

    name: Literal["cosine_with_warmup"] = "cosine_with_warmup"

    def _after(self, at: int, warmup: int, end: int) -> float:
        return between(cosine(progress(at, warmup, end)), self.alpha_f)


@dataclass(frozen=True, kw_only=True)
class Linear(WithFinal):
    """Warm-up, then a straight line down to `alpha_f`."""

    name: Literal["linear"] = "linear"

    def _after(self, at: int, warmup: int, end: int) -> float:
        return between(1 - progress(at, warmup, end), self.alpha_f)


@dataclass(frozen=True, kw_only=True)
class Exponential(WithFinal):
    """Warm-up, then equal ratios in equal times, down to `alpha_f` at the end."""

    name: Literal["exponential"] = "exponential"
    alpha_f: Annotated[float, Meta(gt=0, le=1, description=_NEVER_0)] = 0.1

    def _after(self, at: int, warmup: int, end: int) -> float:
        done = progress(at, warmup, end)
        return self.alpha_f if done == 1.0 else self.alpha_f**done


@dataclass(frozen=True, kw_only=True)
class InvSqrt(WithFinal):
    """Warm-up, then 1 / sqrt(time), towards `alpha_f` (Vaswani et al., 2017).

    It knows no end: a longer run goes on where a shorter one stopped.
    """

    name: Literal["inv_sqrt"] = "inv_sqrt"

    def _after(self, at: int, warmup: int, end: int) -> float:
        return between(math.sqrt(max(warmup, 1) / max(at, 1)), self.alpha_f)


def cosine(done: float) -> float:
    """Return half a cosine: 1 at done = 0, 0 at done = 1."""
    return 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class WSD(WithDecay):
    """Warm-up, stable, decay (Hu et al., 2024)."""

    name: Literal["wsd"] = "wsd"


@dataclass(frozen=True, kw_only=True)
class CosineWithWarmupAndLinearDecay(WithDecay):
    """Warm-up, half a cosine towards `cosine_alpha_f`, cut short by the decay.

    Attributes:
        cosine_alpha_f: where the cosine would end, at the run's end.
    """

    name: Literal["cosine_with_warmup_and_linear_decay"] = "cosine_with_warmup_and_linear_decay"
    cosine_alpha_f: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha_f <= self.cosine_alpha_f <= 1.0:
            refuse("cosine_alpha_f", f"{self.cosine_alpha_f!r} is not from alpha_f to 1")

    def _before(self, at: int, warmup: int, end: int) -> float:
        return between(cosine(progress(at, warmup, end)), self.cosine_alpha_f)


@dataclass(frozen=True, kw_only=True)
class Power(WithDecay):
    """Warm-up, then (time / warm-up) ** exponent, then the decay (Shen et al., 2024).

    Its middle knows no end: a longer run has the same rates up to the decay of a shorter one.

    Attributes:
        exponent: (time / warm-up) to this power; not above 0.
    """

    name: Literal["power"] = "power"
    exponent: Annotated[float, Meta(le=0)] = -0.51

    def _before(self, at: int, warmup: int, end: int) -> float:
        return max(self.alpha_f, (max(at, 1) / max(warmup, 1)) ** self.exponent)


@dataclass(frozen=True, kw_only=True)
class WSDS(WithDecay):
    """Warm-up, stable, decay, and stable again: a decayed model at each period's end.

    Each period but the first goes on at the peak from the decayed weights of the one before (Wen et
    al., 2024). The decay's length counts from the period's.

    Attributes:
        period_lengths: lengths of the periods; what is left of the run is one more.
    """

    name: Literal["wsd_s"] = "wsd_s"
    period_lengths: list[PositiveInt] = field(default_factory=list)

    def _after(self, at: int, warmup: int, end: int) -> float:
        ends = list(accumulate(self.period_lengths))
        if ends and ends[-1] > end:
            refuse_for_run(
                "period_lengths",
                f"they are {ends[-1]:,} {self.units} long together; the run is {end:,}",
                "train longer, or give fewer periods: what is left of the run is one more",
            )
        if not ends or ends[-1] < end:
            ends.append(end)
        period = bisect_left(ends, max(at, 1))
        start = ends[period - 1] if period else 0
        # the warm-up is a part of the first period only
        return super()._after(at - start, max(0, warmup - start), ends[period] - start)


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
class Sequential(LRSchedule):
    """Schedules one after the other, each as if its part were a run of its own.

    The peak of each is the rate at which the one before ended, so the rate never jumps up.

    Attributes:
        schedulers: at least one, in the units of the whole; one after the other, each as if its
            part were a run of its own, with the last rate of the one before for its peak.
        lengths: length of each but the last, which runs to the end.
    """

    name: Literal["sequential"] = "sequential"
    schedulers: Annotated[list[Simple], Meta(min_length=1, examples=["[{name: linear}, ...]"])]
    lengths: list[PositiveInt] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.lengths) != len(self.schedulers) - 1:
            refuse(
                "lengths",
                f"{len(self.lengths)} for {len(self.schedulers)} schedulers",
                "give one for each but the last",
            )
        if any(part.units != self.units for part in self.schedulers):
            refuse("units", f"not all schedulers count {self.units}", "give all the same units")

    def _factor(self, at: int, end: int) -> float:
        starts = [0, *accumulate(self.lengths)]
        if starts[-1] >= end:
            refuse_for_run(
                "lengths",
                f"they are {starts[-1]:,} {self.units} long together; the run is {end:,}",
                "train longer, or give shorter lengths",
            )
        # the last time of a part belongs to it
        part = max(i for i, start in enumerate(starts) if start < max(at, 1))
        stop = starts[part + 1] if part + 1 < len(starts) else end
        peak = 1.0
        parts = zip(self.schedulers[:part], self.lengths, strict=False)
        for number, (before, length) in enumerate(parts, 1):
            peak *= before.lr_factor(length, length)
            if peak == 0.0:
                refuse_for_run(
                    "schedulers",
                    f"number {number}, {before.name}, ends at a rate of 0, and the one after "
                    "it would stay there",
                    "give it an alpha_f above 0",
                )
        return peak * self.schedulers[part].lr_factor(at - starts[part], stop - starts[part])


AnySchedule = Simple | Sequential
"""What `train_module.scheduler` may be, told apart by `name`."""
