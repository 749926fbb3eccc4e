"""A lock of a module, which a forked process has free.

The thread that held it is not in that process, and would never give it back.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager


class ProcessLock:
    """Held by one thread of a process at a time; that thread may take it again."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.RLock()

    def held(self) -> AbstractContextManager[bool]:
        """Hold it while the body runs."""
        return self._lock
