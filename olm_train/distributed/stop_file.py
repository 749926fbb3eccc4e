"""A file `stop` in the folder of a run ends it: `touch RUN/stop`, or a line in it that says why.

A request stays until the run has acted on it: one made while the run waits to be started again
ends that start before its next step.
"""

from __future__ import annotations

import time
from pathlib import Path

from olm_data.errors import OlmError, printable
from olm_data.regular_files import open_regular

NAME = "stop"
POLL_SECONDS = 1.0
"""The folder may lie on a slow file system; steps may be quick."""
MAX_REASON = 500
"""Bytes that are read of the file."""


class StopFile:
    """Looks for the file, at most once in `POLL_SECONDS`.

    Args:
        folder: of the run, local.
        name: of the file; another one asks for something else.
    """

    def __init__(self, folder: Path, name: str = NAME) -> None:
        self.path = folder / name
        self._next = 0.0

    def found(self) -> str | None:
        """Return what the file says, None where there is none or it was looked for just now."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + POLL_SECONDS
        if not self.path.exists():
            return None
        try:
            with open_regular(self.path) as file:
                return printable(file.read(MAX_REASON).decode(errors="replace").strip())
        except (OSError, OlmError):  # no matter what it says
            return ""

    def remove(self) -> None:
        """Remove it: it has done its work."""
        self.path.unlink(missing_ok=True)
