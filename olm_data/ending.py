"""The end of a command: the interpreter is not taken apart first: that takes 0.1 s, for nothing.

    end_soon() at the start: registered first, so it runs after the exit functions of all others
    main -> SystemExit(code) -> threads joined, exit functions -> streams flushed -> gone with code

An uncaught error ends as Python ends it. For the command line alone: what is in the process belongs
to the command, and all that must be on the disk is there before.
"""

from __future__ import annotations

import atexit
import os
import sys

_codes: list[int] = []


def end_soon() -> None:
    """Let this process end without taking the interpreter apart, if `ending` is told how."""
    atexit.register(_end)


def ending(code: object) -> None:
    """Note the exit code that the command ends with: what `SystemExit` holds."""
    _codes[:] = [code if isinstance(code, int) else int(code is not None)]


def _end() -> None:
    if not _codes:
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # Python says what is wrong, and with which exit code
            return
    os._exit(_codes[0])
