"""One rank of a run in which rank 1 stops moving in step 3: `python hung_rank.py LOCK FOLDER ...`.

What follows are options of the run."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from support.runs import build_trainer

from olm_train.callbacks.base import Callback
from olm_train.distributed.world import World


class Hangs(Callback):
    def pre_optim_step(self) -> None:
        if self.trainer.world.rank == 1 and self.trainer.step == 2:
            wait_for_ever()


def wait_for_ever() -> None:
    threading.Event().wait()


if __name__ == "__main__":
    trainer = build_trainer(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        "--trainer.callbacks.watchdog.timeout=20",
        *sys.argv[3:],
        callbacks={"hangs": Hangs()},
        world=World.start(),
    )
    trainer.fit()
