"""The end of a command's loop by SIGTERM: it leaves off where that loses nothing.

SIGTERM -> Stop.set -> whoever waits goes on at once; whoever works asks `is_set` now and then
"""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Iterator


class Stop:
    """An event that a signal handler may set.

    `threading.Event` has a lock, and a handler runs in the middle of whatever its thread does: in
    that of a wait, it would wait for ever for the lock that its own thread holds.
    """

    def __init__(self) -> None:
        self._set = False
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may interrupt `get`

    def set(self) -> None:
        """Wake who waits, and let nobody wait any more."""
        self._set = True
        self._told.put(None)

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def wait(self, seconds: float) -> None:
        """Wait until it is set, or for so many seconds; in one thread."""
        if not self._set:
            with contextlib.suppress(queue.Empty):
                self._told.get(timeout=seconds)


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[Stop]:
    """Give an event that SIGTERM sets, while the body runs; the main thread only."""
    stop = Stop()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
