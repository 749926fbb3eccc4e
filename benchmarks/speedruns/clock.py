"""Takes the time of one of our runs, on each rank: `trainer.callbacks.clock` of its train.yaml."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from olm_train import Callback


@dataclass(kw_only=True)
class Clock(Callback):
    """Writes `FOLDER/rankN.json`: after each step, seconds on the clock and of this processor.

    Evaluations and saves are left out of the clock; processors count them, so a run that is
    measured by those evaluates at its end only.

    Attributes:
        folder: where the files go.
    """

    folder: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._steps: list[tuple[int, float, float]] = []

    def pre_train(self) -> None:
        self._start = (time.perf_counter() - self.trainer.paused_seconds, time.process_time())

    def post_step(self) -> None:
        wall, processors = self._start
        here = time.perf_counter() - self.trainer.paused_seconds - wall
        self._steps.append((self.trainer.step, here, time.process_time() - processors))

    def post_train(self) -> None:
        path = Path(self.folder) / f"rank{self.trainer.world.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._steps))
