"""Work ahead in one background thread: a bounded queue whose errors reach the consumer.

    producer thread: next(items) -> channel (at most `depth` items) -> consumer: next(prefetcher)

Never a process and never a timeout: a thread that waits is woken by the event it waits for, and
closing wakes both sides. The order of items is the order of the iterator; depth changes nothing but
how far ahead the thread runs.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from olm_data.threads import end_of

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterator over `items`, computed up to `depth` items ahead.

    An exception raised by `items` is raised, the same object, by the `next` that would have
    returned the item. `close` (also on `with` exit and interpreter exit) stops the thread and waits
    for it; the item being computed at that moment is finished and dropped. Garbage collection stops
    the thread and does not wait.

    Args:
        items: iterator, used from the background thread only.
        depth: items kept ready, at least 1.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self._channel: _Channel[T] = _Channel(depth)
        # Daemon, so that the interpreter's exit does not wait for a thread that waits for its
        # consumer; the finalizer runs before daemon threads are cut off and joins it properly. The
        # thread knows only the channel: a prefetcher nobody holds is collected.
        thread = threading.Thread(
            target=_produce, args=(items, self._channel), name="olm-prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, _stop, self._channel, thread, weakref.ref(self))
        self.wait_seconds = 0.0
        """Seconds the consumer has waited for items so far (monotonic clock)."""
        thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        begun = time.perf_counter()
        try:
            return self._channel.take()
        finally:
            self.wait_seconds += time.perf_counter() - begun

    def ready(self, seconds: float) -> bool:
        """Wait up to `seconds` until `next` need not wait; return whether that is so."""
        begun = time.perf_counter()
        try:
            return self._channel.ready(seconds)
        finally:
            self.wait_seconds += time.perf_counter() - begun

    def close(self) -> None:
        """Stop the thread and wait for it. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Channel(Generic[T]):
    """Bounded first-in first-out queue with an end, an error, and a close that wakes both sides."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._closed = False

    def put(self, item: T) -> bool:
        """Append `item` when there is room; return False if the channel was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def end(self, error: BaseException | None = None) -> None:
        """Say that no item follows, because the iterator is exhausted or because of `error`."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def ready(self, seconds: float) -> bool:
        """Wait up to `seconds` for an item, the end, or a close; return whether there is one."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._closed or self._ended or self._items), seconds
            )

    def take(self) -> T:
        """Return the next item; raise StopIteration at the end, or the producer's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ended or self._items)
            if self._closed:
                raise RuntimeError("this prefetcher is closed")
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Drop what is queued and wake both sides."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _produce(items: Iterator[T], channel: _Channel[T]) -> None:
    try:
        for item in items:
            if not channel.put(item):
                return
            del item  # the queue owns it now: its memory is free as soon as the consumer drops it
    except BaseException as error:  # handed over, not swallowed: `take` raises it in the consumer
        channel.end(error)
    else:
        channel.end()


def _stop(
    channel: _Channel[T], thread: threading.Thread, owner: weakref.ref[Prefetcher[T]]
) -> None:
    channel.close()
    end_of([thread], owner)
