"""Learning-rate schedules: pure functions of how far a run is, counted in steps or in tokens.

A schedule multiplies the optimiser's peak rate by a factor in [0, 1].

    factor  1 |    ________________              1 |   /\\__               1 |  _____  ____
              |   /                \\               |  /    \\__              | /     \\|    \\
      alpha_f |  /                  \\      alpha_f | /        \\___  alpha_f |/            \\
              +------------------------            +---------------        +----------------
                 warm-up  stable  decay  (wsd)      warm-up  cosine          wsd_s, two periods
"""

from __future__ import annotations

from olm_train.optim.schedule.base import Schedule
from olm_train.optim.schedule.falling import (
    Constant,
    CosineWithWarmup,
    Exponential,
    InvSqrt,
    Linear,
)
from olm_train.optim.schedule.sequential import Sequential, Simple
from olm_train.optim.schedule.with_decay import WSD, WSDS, CosineWithWarmupAndLinearDecay, Power

AnySchedule = Simple | Sequential
"""What `train_module.scheduler` may be, told apart by `name`."""

__all__ = [
    "WSD",
    "WSDS",
    "AnySchedule",
    "Constant",
    "CosineWithWarmup",
    "CosineWithWarmupAndLinearDecay",
    "Exponential",
    "InvSqrt",
    "Linear",
    "Power",
    "Schedule",
    "Sequential",
]
