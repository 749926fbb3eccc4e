"""Schedules that end in a linear decay of their own length."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Literal

from msgspec import Meta

from olm_data.config.hints import NonNegativeInt, PositiveInt, Proportion
from olm_train.optim.schedule.base import (
    WithFinal,
    between,
    length_of,
    must_fit,
    one_length,
    progress,
    refuse,
)
from olm_train.optim.schedule.falling import cosine


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
        result: float = max(self.alpha_f, (max(at, 1) / max(warmup, 1)) ** self.exponent)
        return result


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
            refuse(
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
