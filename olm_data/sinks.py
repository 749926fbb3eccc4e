"""What a process says besides its own messages, without credentials.

    tracebacks (also of threads and finalizers)     -> shown, on standard error
    logging, of any library, with its tracebacks    -> redacted before any handler has it
    a log that cannot be written, as on a full disk -> one line, on standard error
    warnings                                        -> shown

Commands and workers call `guard` first; a library does not change its host's logging, so that
importing this package does nothing. Our own errors are redacted where they are made.

Also: standard streams that may be closed, full or gone: results are never lost in silence.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from types import TracebackType
from typing import Any

from olm_data.errors import ResourceError, shown
from olm_data.redaction import redacted


class OutputLost(ResourceError):
    """Standard output cannot be written."""


def secure_streams() -> None:
    """Put streams that cannot fail unseen in the place of the standard ones.

    Raises:
        ResourceError: the working folder was deleted, so that no relative path means anything.
    """
    for number, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        name = ("stdin", "stdout", "stderr")[number]
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  # ends with us
    if not faulthandler.is_enabled():
        faulthandler.enable(2)
    sys.stdout, sys.stderr = _guarded(sys.stdout, _Results), _guarded(sys.stderr, _Remarks)
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ResourceError(
            "the working folder was deleted",
            why="no path that is relative to it means anything",
            fix="change to a folder that is there: cd ~",
        ) from error


def drop_results() -> None:
    """Let what standard output still holds go nowhere, as it cannot be written."""
    _to_nowhere(sys.stdout.fileno())


def _to_nowhere(number: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


class _Results(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # the reader has seen enough, as in `olm-data show ... | head`
            _to_nowhere(self.fileno())
            return len(data)
        except OSError as error:
            raise OutputLost(
                f"standard output cannot be written: {error.strerror}",
                why="the result is incomplete",
                fix="write it to a place with room, and run the same command again",
            ) from error


class _Remarks(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _guarded(stream: Any, kind: type[io.FileIO]) -> Any:
    """Return a text stream like the given one whose bytes go through `kind`."""
    try:
        stream.flush()
        raw = kind(stream.fileno(), "w", closefd=False)
    except (OSError, ValueError):  # no file: somebody who calls us keeps what is written
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=kind is _Remarks,
    )


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
