"""How long a contestant trains: seconds on the clock, or seconds of processors on a busy machine.

    first steps of a throwaway run -> time of a step -> steps that fit -> the run, with its schedule

A schedule has to know its end, so the number of steps is fixed before the run; what the run then
took is reported beside what it was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from speedruns.text import Measured

WARM_UP, TIMED = 3, 9
"""Steps of the throwaway run that do not count, and those whose median does."""


@dataclass(frozen=True)
class Budget:
    """What each contestant may use.

    Attributes:
        seconds: of training, for the whole machine.
        cores: threads of a contestant.
        processors: count seconds of processors instead, `seconds * cores` of them.
        fixed_steps: of every run, where runs of one contestant are compared with each other.
    """

    seconds: float
    cores: int
    processors: bool = False
    fixed_steps: int | None = None

    @property
    def limit(self) -> float:
        """Seconds of whichever clock counts."""
        return self.seconds * self.cores if self.processors else self.seconds

    def now(self) -> float:
        """Return the time of the clock that counts, in this process."""
        return time.process_time() if self.processors else time.perf_counter()

    def steps(self, times: list[float]) -> int:
        """Return the steps that fit, of the times of a throwaway run's steps."""
        timed = sorted(times[WARM_UP:])
        return self.fixed_steps or max(2, round(self.limit / timed[len(timed) // 2]))

    def calibrate(self, step: Callable[[], object]) -> int:
        """Return the steps that fit, by taking some; `fixed_steps` without taking any."""
        if self.fixed_steps:
            return self.fixed_steps
        times = []
        for _ in range(WARM_UP + TIMED):
            start = self.now()
            step()
            times.append(self.now() - start)
        return self.steps(times)


@dataclass
class Stopwatch:
    """The time that a loop trains for, its evaluations left out."""

    budget: Budget
    used: float = 0.0
    wall: float = 0.0
    _from: tuple[float, float] = field(default=(0.0, 0.0))

    def start(self) -> None:
        """Count from here on."""
        self._from = (self.budget.now(), time.perf_counter())

    def stop(self) -> None:
        """Count no longer."""
        self.used += self.budget.now() - self._from[0]
        self.wall += time.perf_counter() - self._from[1]


@dataclass
class Point:
    """What was measured of each source, and the training it took.

    Attributes:
        seconds: on the clock, evaluations left out.
        used: of the clock that counts.
        bits: by source.
    """

    step: int
    tokens: int
    seconds: float
    used: float
    bits: dict[str, Measured]


@dataclass(frozen=True)
class Tuning:
    """What is tuned of every contestant.

    Attributes:
        rate: the peak.
        warmup: fraction of the run.
    """

    rate: float
    warmup: float


def evaluated_steps(steps: int, points: int) -> set[int]:
    """Return the steps after which a run of `steps` is evaluated, the last among them."""
    return {max(1, round(steps * (n + 1) / points)) for n in range(points)}
