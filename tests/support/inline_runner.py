"""A runner without processes: a test can look at, stop or change what happens at each task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from olm_data.runners.base import Count, Done, Job, Note, Runner, Watch, whole
from olm_data.runners.local import Reporter


class InlineRunner(Runner):
    """Runs the tasks one after the other in this process."""

    def run(
        self, job: Job, tasks: Sequence[int], total: int, *, done: Done, watch: Watch, note: Note
    ) -> None:
        counts = np.zeros((total, len(Count)), np.int64)
        for task in tasks:
            done(task, whole(job.run(task, Reporter(counts[task]))))
            watch(counts, [])


class Never(InlineRunner):
    """A runner that must not be reached."""

    def run(self, *_: Any, **__: Any) -> None:
        raise AssertionError("work began")


class Around(InlineRunner):
    """Does something before task `at`, and something when all are done."""

    def __init__(
        self, before: Callable[[], object] = int, at: int = 0, after: Callable[[], object] = int
    ) -> None:
        self.before, self.at, self.after = before, at, after

    def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
        for task in tasks:
            if task == self.at:
                self.before()
            super().run(job, [task], total, **callbacks)
        self.after()
