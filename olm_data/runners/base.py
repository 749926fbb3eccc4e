"""What a runner is: something that runs every task of a job once and owns no state of its own.

    Job (picklable, sent once to each worker), task numbers -> Runner -> done(task, result)
                                                                      -> watch(counts, running)

A job's outcome may not depend on the runner: tasks are independent, may run in any order, on any
number of workers, and more than once. Whatever must survive is on disk when `Job.run` returns, or
when the `Deferred` that it returns is finished.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from olm_data.errors import ResourceError
from olm_data.redaction import redacted

RETRIES = 2
"""How often a task is given out again after a worker or its node died on it."""


class Count(IntEnum):
    """What a task counts while it runs: the columns of the counts array, int64."""

    DOCUMENTS = 0
    TEXT_BYTES = 1
    TOKENS = 2
    DROPPED = 3
    """Records dropped for any reason."""
    BAD = 4
    """Of these, the ones that count against `--max-bad`."""
    READ_US = 5
    ENCODE_US = 6
    WRITE_US = 7
    """Microseconds each stage was at work; stages overlap, so they do not sum to wall time."""
    BY_REFERENCE = 8
    """Documents encoded by the reference, as nothing is proved of the faster encoder for them."""
    PEAK_KIB = 9
    """Peak memory of the worker."""


class Report(Protocol):
    """Adds to what the running task has done so far."""

    def __call__(
        self,
        *,
        documents: int = 0,
        text_bytes: int = 0,
        tokens: int = 0,
        dropped: int = 0,
        bad: int = 0,
        read_us: int = 0,
        encode_us: int = 0,
        write_us: int = 0,
        by_reference: int = 0,
    ) -> None: ...


Done = Callable[[int, Any], None]
"""`done(task, result)`: called in the parent once for each task, in order of completion."""

Watch = Callable[[np.ndarray, Sequence[int]], None]
"""`watch(counts, running)`: called now and then in the parent. counts is
int64[tasks, len(Count)], a row for each task number. It may raise: the run ends with that error."""

Note = Callable[[str], None]
"""`note(text)`: a line for the user about something unusual, such as a worker that died."""


@dataclass(frozen=True)
class Deferred:
    """What is left of a task that waits for the disk more than it works: a runner may finish it
    in another thread while the process begins its next task.

    Attributes:
        finish: called once; returns the task's result, or raises its error.
    """

    finish: Callable[[], Any]


def whole(result: Any) -> Any:
    """Return the result of a task, finished here and now if it is not."""
    return result.finish() if isinstance(result, Deferred) else result


class Job(Protocol):
    """The work of one run. It crosses process borders by pickle, once a worker.

    Jobs are values: equal jobs do the same work.
    """

    def prepare(self) -> None:
        """Load what tasks need; called once in a worker before its first task. Never raises what
        a task would raise: the task that needs it does. There may be nothing to load."""

    def run(self, task: int, report: Report) -> Any:
        """Do task number `task` and return a small picklable result, or its `Deferred` rest."""

    def describe(self, task: int) -> str:
        """Return words that say which input a task reads, for messages."""


@runtime_checkable
class StoredJob(Job, Protocol):
    """A job that workers elsewhere load from storage (`stored_job.load_job`).

    Attributes:
        output: where it is stored and its tasks' commit records go; absolute.
        identity: differs between jobs that write other bytes.
        own_parts: it names classes of somebody's own, which its workers import.
    """

    @property
    def output(self) -> str: ...

    @property
    def own_parts(self) -> bool: ...

    @property
    def identity(self) -> str: ...

    def beside(self, worker: str) -> Self:
        """Return the job for a process of that name, which works beside the parent's own."""

    def finished(self, task: int) -> Any | None:
        """Return what `run` returned for a task that some process has committed, or None."""


class Runner(Protocol):
    """Runs tasks: `local.LocalRunner`, or one of the group `olm_data.runners`."""

    def ready(self, job: Job, workers: int, total: int) -> AbstractContextManager[None]:
        """Get up to `workers` workers ready for a job that will probably be run, while the caller
        goes on. A runner may do nothing; what was got ready in vain is gone after the block.

        Args:
            total: as for `run`.
        """
        return nullcontext()

    def run(
        self, job: Job, tasks: Sequence[int], total: int, *, done: Done, watch: Watch, note: Note
    ) -> None:
        """Run each of `tasks` (numbers below `total`) and return when all are done.

        Raises:
            OlmError: the first error a task raised; other tasks may be left undone.
            ResourceError: a worker process died again and again on the same task.
        """


class NamedRunner(Runner, Protocol):
    """A runner that a recipe may name.

    Attributes:
        workers: tasks at a time.
    """

    workers: int

    def planned(self, tasks: int) -> str:
        """Return in words where so many tasks would run."""


Outcome = tuple[Exception | None, str, Any]
"""(error, its traceback as text, result)."""


def attempt(job: Job, task: int, work: Callable[[], Any]) -> Outcome:
    """Do work of a task, at the border of a process, where all errors must go back.

    Panics of Rust code too. Text is redacted here: the parent may not know the credentials of
    another machine's clients.
    """
    try:
        return None, "", work()
    except MemoryError:
        error = ResourceError(
            "not enough memory",
            where=job.describe(task),
            fix="run again with fewer --workers; finished shards are kept",
        )
        return error, redacted(traceback.format_exc()), None
    except BaseException as error:
        return _portable(error), redacted(traceback.format_exc()), None


def result_of(outcome: Outcome) -> Any:
    """Return the result, or raise the error with the traceback of its process as cause."""
    error, trace, result = outcome
    if error is not None:
        raise error from RemoteTrace(trace)
    return result


def after_death(
    who: str, how: str, where: str, deaths: int, note: Note, *, why: str, fix: str
) -> None:
    """Say that a worker died on a task, which is tried again.

    Args:
        who, how: the worker, and of what it died.
        where: the input of the task.
        deaths: of workers on it.
        why, fix: for the error.

    Raises:
        ResourceError: it was tried again often enough.
    """
    if deaths > RETRIES:
        raise ResourceError(
            f"{who} died {deaths} times on the same input ({how})", where=where, why=why, fix=fix
        )
    note(f"{who} died ({how}) on {where}; trying again ({deaths}/{RETRIES})")


class RemoteTrace(Exception):
    """Carries the text of a worker's traceback, shown with --debug."""


def _portable(error: BaseException) -> Exception:
    """Return `error` if it is an exception that any process knows and that holds no credential."""
    known = type(error).__module__.split(".")[0] in ("builtins", "olm_data")
    if isinstance(error, Exception) and known and redacted(str(error)) == str(error):
        return error
    return RuntimeError(redacted(f"{type(error).__name__}: {error}"))
