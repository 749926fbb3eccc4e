"""A job that kills its own worker: tests of runners import it in worker processes too."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olm_data.runners.base import Job, Report, Runner

TASK = 3
"""The task that kills."""


@dataclass
class DieOnce(Job):
    """Wraps a job; the worker of task 3 dies after its first batch, `deaths` times in all."""

    job: Any
    marks: str
    deaths: int

    def run(self, task: int, report: Report) -> Any:
        def dying(**counts: int) -> None:
            report(**counts)
            marks = Path(self.marks)
            if task == TASK and (not marks.exists() or len(marks.read_bytes()) < self.deaths):
                with open(marks, "ab") as file:
                    file.write(b"x")
                os.kill(os.getpid(), signal.SIGKILL)

        return self.job.run(task, dying)

    def describe(self, task: int) -> str:
        return str(self.job.describe(task))

    def beside(self, worker: str) -> DieOnce:
        return DieOnce(self.job.beside(worker), self.marks, self.deaths)

    def finished(self, task: int) -> Any:
        return self.job.finished(task)

    @property
    def output(self) -> str:
        return str(self.job.output)

    @property
    def own_parts(self) -> bool:
        return False

    @property
    def identity(self) -> str:
        return str(self.job.identity)


@dataclass
class Dying(Runner):
    """A runner whose job kills its worker in the middle of a task."""

    inner: Runner
    folder: Path
    deaths: int

    def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
        dying = DieOnce(job, str(self.folder / "marks"), self.deaths)
        self.inner.run(dying, tasks, total, **callbacks)
