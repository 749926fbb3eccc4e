"""Schedules of one curve after the warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from olm_train.optim.schedule.base import WithFinal, WithWarmup, between, progress, refuse


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha_f == 0:
            refuse("alpha_f", "an exponential never reaches 0", "use a small number, or linear")

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
