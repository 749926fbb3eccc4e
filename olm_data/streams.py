"""Standard streams that may be closed, full or gone: results are never lost in silence.

    closed stream            -> the null device, so that no file of data gets its number
    standard output fails    -> OutputLost (exit 5)
    a pipe nobody reads      -> what more there is to print is left out; the work goes on
    standard error fails     -> the same
    a crash in native code   -> where each thread was, on standard error

For the command line alone, at its start.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
from typing import Any

from olm_data.errors import ResourceError


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
