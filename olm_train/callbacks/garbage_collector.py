"""Garbage collection at fixed steps, on all ranks at once, instead of whenever Python likes.

One rank that pauses to collect stops all of them at the next collective.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

from olm_data.config.hints import PositiveInt
from olm_train.callbacks.base import Callback


@dataclass(kw_only=True)
class GarbageCollectorCallback(Callback):
    """When Python's garbage is collected.

    Attributes:
        enabled: collect Python's garbage at fixed steps; false: leave it to Python.
        gc_interval: steps between collections of the young generations.
    """

    enabled: bool = True
    gc_interval: PositiveInt = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        self._was_enabled = False

    def pre_train(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.freeze()  # modules, model and data stay: later collections need not look at them

    def post_step(self) -> None:
        if self.trainer.step % self.gc_interval == 0:
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
