"""Jobs for tests of runners. They live here so that worker processes can import them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from olm_data.errors import InputError
from olm_data.runners.base import Job, Report


@dataclass(frozen=True)
class Squares(Job):
    """Returns the square of the task number; can die or raise on one task, and note `prepare`."""

    folder: str
    deaths: int = 0
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
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "input":
                raise InputError("bad line", where="a.jsonl line 3", why="w", fix="f")
            if self.fault == "defect":
                raise KeyError("nothing here")
            if self.fault == "memory":
                raise MemoryError
        return task * task

    def describe(self, task: int) -> str:
        return f"input-{task}.jsonl"
