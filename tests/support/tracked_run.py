"""A run with trackers, slow enough for them to follow, that kills itself.

usage: python -m support.tracked_run LOCK FOLDER STEP TRACKER...

STEP: after which it is killed; 0: never
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from support.runs import build_trainer

from olm_train.callbacks.base import Callback
from olm_train.extensions.tracking import callback

SECONDS = 0.25


class Killed(Callback):
    """Waits after each step, and ends the process at one of them."""

    def __init__(self, step: int) -> None:
        self.step = step

    def post_step(self) -> None:
        time.sleep(SECONDS)
        if self.trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    callback.PATIENCE = 600.0  # a slow machine hangs not
    lock, folder, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    on = [f"--trainer.callbacks.{name}={{}}" for name in sys.argv[4:]]
    log_each = "--trainer.metrics_collect_interval=1"
    build_trainer(lock, folder, log_each, *on, callbacks={"killed": Killed(step)}).fit()
