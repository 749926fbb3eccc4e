"""What comes back from a task that another process ran: its result, or its error."""

from __future__ import annotations

import traceback
from typing import Any

from olm_data.errors import ResourceError
from olm_data.runners.base import Job, Report

Outcome = tuple[Exception | None, str, Any]
"""(error, its traceback as text, result)."""


def attempt(job: Job, task: int, report: Report) -> Outcome:
    """Run a task. At the border of a process all errors must go back, panics of Rust code too."""
    try:
        return None, "", job.run(task, report)
    except MemoryError:
        error = ResourceError(
            "not enough memory",
            where=job.describe(task),
            fix="run again with fewer --workers; finished shards are kept",
        )
        return error, traceback.format_exc(), None
    except BaseException as error:
        return _portable(error), traceback.format_exc(), None


def result_of(outcome: Outcome) -> Any:
    """Return the result, or raise the error with the traceback of its process as cause."""
    error, trace, result = outcome
    if error is not None:
        raise error from RemoteTrace(trace)
    return result


class RemoteTrace(Exception):
    """Carries the text of a worker's traceback, shown with --debug."""


def _portable(error: BaseException) -> Exception:
    """Return `error` if it is an ordinary exception of a module any process has."""
    if isinstance(error, Exception) and type(error).__module__.split(".")[0] in (
        "builtins",
        "olm_data",
    ):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
