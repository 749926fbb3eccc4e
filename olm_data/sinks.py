"""What a process says besides its own messages, without credentials.

    tracebacks (also of threads and finalizers)     -> shown, on standard error
    logging, of any library, with its tracebacks    -> redacted before any handler has it
    a log that cannot be written, as on a full disk -> one line, on standard error
    warnings                                        -> shown

Commands and workers call `guard` first; a library does not change its host's logging, so that
importing this package does nothing. Our own errors are redacted where they are made.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from types import TracebackType
from typing import Any

from olm_data.errors import shown
from olm_data.redaction import redacted


def guard() -> None:
    """Put the redaction before every sink of this process; again changes nothing."""
    sys.excepthook = print_traceback
    threading.excepthook = sys.unraisablehook = _told
    if not isinstance(logging.getLogRecordFactory(), _Records):
        logging.setLogRecordFactory(_Records(logging.getLogRecordFactory()))
    logging.Handler.handleError = _log_failed  # type: ignore[assignment,method-assign]
    warnings.formatwarning = _warning


def print_traceback(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Print a traceback as Python does, without the credentials that errors may hold."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(shown(text), end="", file=sys.stderr, flush=True)


def _told(told: Any) -> None:
    if told.exc_type is not SystemExit:  # a thread may end by it, and Python prints nothing
        print_traceback(told.exc_type, told.exc_value, told.exc_traceback)


class _Records:
    """Makes log records whose message and traceback hold no credential."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, *args: Any, **more: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._make(*args, **more)
        try:
            said = record.getMessage()
        except Exception:  # logging reports a bad format string itself, with its arguments
            record.msg, record.args = redacted(f"{record.msg!r} {record.args!r}"), ()
        else:
            clean = redacted(said)
            if clean != said:
                record.msg, record.args = clean, ()
        if record.exc_info:  # formatters take this text where there is one
            record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
        return record


_failed_logs = set[tuple[str, type[BaseException] | None]]()


def _log_failed(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Say that a handler failed, once for a library and kind of error: a log has many lines."""
    kind, error, _ = sys.exc_info()
    library = record.name.partition(".")[0]
    if (library, kind) in _failed_logs:
        return
    _failed_logs.add((library, kind))
    with suppress(OSError, ValueError):  # standard error may be what failed
        why = shown(f"{kind.__name__ if kind else 'error'}: {error}")
        print(f"warning: {shown(library)} could not write its log: {why}", file=sys.stderr)


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None
) -> str:
    return f"{filename}:{lineno}: {category.__name__}: {shown(str(message))}\n"
