"""TensorBoard: event files in `tensorboard/` of the run's folder. Nothing leaves the machine.

A start writes a file of its own, which begins with the step from which on what earlier files have
is void (`purge_step`); readers of the folder leave that out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from olm_data.extras import needs
from olm_data.run_log.follow import LoggedStep
from olm_train.callbacks.tracking.base import Ending, Level, TrackedRun, Tracker
from olm_train.callbacks.tracking.callback import TrackerCallback

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

FOLDER = "tensorboard"


@dataclass(kw_only=True)
class TensorBoardCallback(TrackerCallback):
    """Shows the run in TensorBoard: `tensorboard --logdir RUN/tensorboard`.

    Attributes:
        enabled: write event files, where `tensorboard` is given at all.
        name: shown above the configuration; default: that of the run's folder.
        project: shown with it; default: "olm".
    """

    kind: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboard"

    def tracker(self, run: TrackedRun) -> Tracker:
        return TensorBoardTracker(run)


class TensorBoardTracker(Tracker):
    """Writes event files; what `log` returns for survives this process."""

    name = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._logged, self._last = 0, 0
        self._writer: SummaryWriter | None = None

    def open(self, key: str | None, logged: int) -> str:
        self._close()
        self._logged = logged if key else 0
        return FOLDER

    def truncate(self, step: int) -> int:
        with needs("the tracker tensorboard"):
            from torch.utils.tensorboard.writer import SummaryWriter

        # A step that was being written when the process was killed is beyond `logged`.
        there = min(step, self._logged)
        folder = self._run.folder / FOLDER
        self._writer = SummaryWriter(str(folder), purge_step=there + 1)
        if not there:
            text = json.dumps(self._run.config, indent=1, default=str)
            title = f"{self._run.project}: {self._run.name}"
            self._writer.add_text("config", f"# {title}\n```json\n{text}\n```", 0)
        return there

    def log(self, steps: list[LoggedStep]) -> None:
        self.log_earlier(steps)
        self._last = steps[-1].step

    def log_earlier(self, steps: list[LoggedStep]) -> bool:
        assert self._writer is not None
        for step in steps:
            for name, value in step.metrics.items():
                self._writer.add_scalar(name, value, step.step, walltime=step.time or None)
        self._writer.flush()
        return True

    def alert(self, title: str, text: str, level: Level) -> None:
        assert self._writer is not None
        self._writer.add_text(f"alert/{level}", f"**{title}**\n\n{text}", self._last)
        self._writer.flush()

    def close(self, ending: Ending) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
