"""An export in a process of its own, beside a run: begun, looked at, and over with its parent.

    Beside(arguments) --> python -m ...hf_export.beside: `olm-train export`
                          stdin ends: the parent is gone, and so is the child, at once

A child that is killed leaves a draft, which no reader takes and the next export of that place
clears.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from olm_data.errors import shown
from olm_train.cli import main

_GONE_SECONDS = 10.0
"""What a child gets to end that was asked to."""
_OF_RANKS = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)


class Beside:
    """A child that exports.

    Args:
        arguments: of `olm-train export`.
        log: file that takes what it prints.
    """

    def __init__(self, arguments: list[str], log: Path) -> None:
        env = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with open(log, "ab") as file:
            self._log, self._begin = log, file.tell()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "olm_train.extensions.hf_export.beside", *arguments],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=env,
            )

    @property
    def process_id(self) -> int:
        """Of the child."""
        return self._child.pid

    def failed(self) -> str | None:
        """Return why it failed, "" where it did not; None while it is at work. Does not wait."""
        code = self._child.poll()
        if code is not None:
            self.end()
        if not code:
            return None if code is None else ""
        said = self._log.read_bytes()[self._begin :].decode(errors="replace")
        why = said.rpartition("error: ")[2].strip() if "error: " in said else ""
        return shown(why) or f"the process ended with code {code}"

    def end(self) -> None:
        """End it now; what it wrote so far counts for nothing."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(_GONE_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _end_with_parent() -> None:
    """End this process when its stdin does."""
    while os.read(0, 1 << 10):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, name="olm-parent", daemon=True).start()
    main("export")
