"""What comes back from a task that another process ran: its result, or its error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from olm_data.errors import ResourceError
from olm_data.redaction import redacted
from olm_data.runners.base import Deferred, Job, Report, whole

Outcome = tuple[Exception | None, str, Any]
"""(error, its traceback as text, result)."""


def attempt(job: Job, task: int, report: Report) -> Outcome:
    """Run a task to its end. See `begin`."""
    return _tried(job, task, lambda: whole(job.run(task, report)))


def begin(job: Job, task: int, report: Report) -> Outcome:
    """Run a task, but for its `Deferred`, which is the result then: for `finish`.

    At the border of a process all errors must go back, panics of Rust code too. Text is redacted
    here: the parent may not know the credentials of another machine's clients.
    """
    return _tried(job, task, lambda: job.run(task, report))


def finish(job: Job, task: int, rest: Deferred) -> Outcome:
    """Do what is left of a task that was begun."""
    return _tried(job, task, rest.finish)


def _tried(job: Job, task: int, work: Callable[[], Any]) -> Outcome:
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


class RemoteTrace(Exception):
    """Carries the text of a worker's traceback, shown with --debug."""


def _portable(error: BaseException) -> Exception:
    """Return `error` if it is an exception that any process knows and that holds no credential."""
    known = type(error).__module__.split(".")[0] in ("builtins", "olm_data")
    if isinstance(error, Exception) and known and redacted(str(error)) == str(error):
        return error
    return RuntimeError(redacted(f"{type(error).__name__}: {error}"))
