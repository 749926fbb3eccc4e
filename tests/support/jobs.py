"""Jobs for tests of runners. They live here so that worker processes can import them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from olm_data.errors import InputError
from olm_data.runners.base import Deferred, Job, Report


@dataclass(frozen=True)
class Squares(Job):
    """Returns the square of the task number; can die or raise on one task, and note `prepare`."""

    folder: str
    deaths: int = 0
    dies_by: int = signal.SIGKILL
    fault: str = ""
    prepared: str = ""

    def prepare(self) -> None:
        if self.prepared:
            with open(self.prepared, "ab") as file:
                file.write(b"x")

    def run(self, task: int, report: Report) -> int:
        report(documents=1, text_bytes=10, tokens=100)
        if task == 2:
            marks = Path(self.folder, "deaths")
            seen = len(marks.read_bytes()) if marks.exists() else 0
            if seen < self.deaths:
                with open(marks, "ab") as file:
                    file.write(b"x")
                if self.dies_by:
                    os.kill(os.getpid(), self.dies_by)
                os._exit(1)
            if self.fault == "input":
                raise InputError("bad line", where="a.jsonl line 3", why="w", fix="f")
            if self.fault == "defect":
                raise KeyError("nothing here")
            if self.fault == "memory":
                raise MemoryError
        return task * task

    def describe(self, task: int) -> str:
        return f"input-{task}.jsonl"


@dataclass(frozen=True)
class Durable(Job):
    """Leaves a `Deferred` that is only finished once the task after it was begun, but for the last.

    `dies` in that task, once or always, while the one before it waits; or its `Deferred` fails.
    """

    folder: str
    last: int
    dies: int = 0
    fails: int | None = None

    def prepare(self) -> None:
        pass

    def run(self, task: int, report: Report) -> Deferred:
        with open(Path(self.folder, f"begun-{task}"), "ab") as file:
            file.write(b"x")
        if task == 2 and len(Path(self.folder, "begun-2").read_bytes()) <= self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return Deferred(partial(self._finish, task))

    def _finish(self, task: int) -> int:
        if task == self.fails:
            raise InputError("the disk is gone", where=self.describe(task))
        following = Path(self.folder, f"begun-{task + 1}")
        late = time.monotonic() + 600
        while task < self.last and not following.exists():
            assert time.monotonic() < late, "the next task was not begun"
            time.sleep(0.005)
        return task * task

    def describe(self, task: int) -> str:
        return f"input-{task}.jsonl"


@dataclass(frozen=True)
class Environment(Job):
    """Returns the environment that a task finds."""

    def prepare(self) -> None:
        pass

    def run(self, task: int, report: Report) -> dict[str, str]:
        return dict(os.environ)

    def describe(self, task: int) -> str:
        return str(task)
