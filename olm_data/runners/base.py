"""What a runner is: something that runs every task of a job once and owns no state of its own.

    Job (picklable, sent once to each worker), task numbers -> Runner -> done(task, result)
                                                                      -> watch(counts, running)

A job's outcome may not depend on the runner: tasks are independent, may run in any order, on any
number of workers, and more than once. Whatever must survive is on disk when `Job.run` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

DOCUMENTS, TEXT_BYTES, TOKENS, PEAK_KIB = range(4)
"""Columns of the counts array."""

Report = Callable[[int, int, int], None]
"""`report(documents, text_bytes, tokens)`: adds to what the running task has done so far."""

Done = Callable[[int, Any], None]
"""`done(task, result)`: called in the parent once for each task, in order of completion."""

Watch = Callable[[np.ndarray, Sequence[int]], None]
"""`watch(counts, running)`: called now and then in the parent. counts is int64[tasks, 4]:
documents, bytes of text, tokens, peak memory of the worker in KiB; a row for each task number."""

Note = Callable[[str], None]
"""`note(text)`: a line for the user about something unusual, such as a worker that died."""


class Job(Protocol):
    """The work of one run. It crosses process borders by pickle, once a worker."""

    def run(self, task: int, report: Report) -> Any:
        """Do task number `task` and return a small picklable result."""

    def describe(self, task: int) -> str:
        """Return words that say which input a task reads, for messages."""


class Runner(Protocol):
    """Runs tasks. Implementations: `local.LocalRunner`, `local.InlineRunner`."""

    def run(
        self, job: Job, tasks: Sequence[int], total: int, *, done: Done, watch: Watch, note: Note
    ) -> None:
        """Run each of `tasks` (numbers below `total`) and return when all are done.

        Raises:
            OlmError: the first error a task raised; other tasks may be left undone.
            ResourceError: a worker process died again and again on the same task.
        """
