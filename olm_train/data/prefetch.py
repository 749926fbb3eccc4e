"""Work ahead in one background thread: bounded, and its errors reach the consumer.

    a thread: next(items) -> results, in order, of at most `depth` + 1 calls -> next(prefetcher)

Never a process and never a timeout: nothing is begun that there is no room for, so the thread waits
for no consumer. The order of items is the order of the iterator; depth changes nothing but how far
ahead the thread runs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_END: Any = object()
"""Stands for an item behind the last one."""


class Prefetcher(Generic[T]):
    """Iterator over `items`, computed up to `depth` items ahead.

    An exception raised by `items` is raised, the same object, by the `next` that would have
    returned the item. `close` (also on interpreter exit) stops the thread and waits
    for it; the item being computed at that moment is finished and dropped. Garbage collection stops
    the thread and does not wait.

    Args:
        items: iterator, used from the background thread only.
        depth: items kept ready beside the one being computed, at least 1.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        # The thread knows only `items`: a prefetcher nobody holds is collected.
        self._items, self._pool = items, ThreadPoolExecutor(1, "olm-prefetch")
        self._ahead = deque[Future[T]]()
        self._finalizer = weakref.finalize(self, _stop, self._pool, weakref.ref(self))
        for _ in range(depth + 1):
            self._begin()

    def _begin(self) -> None:
        self._ahead.append(self._pool.submit(next, self._items, _END))

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if not self._finalizer.alive:
            raise RuntimeError("this prefetcher is closed")
        try:
            item = self._ahead[0].result()
        except CancelledError:
            raise RuntimeError("this prefetcher is closed") from None
        if item is _END:
            raise StopIteration
        self._ahead.popleft()
        self._begin()
        return item

    def ready(self, seconds: float) -> bool:
        """Wait up to `seconds` until `next` need not wait; return whether that is so."""
        return not wait([self._ahead[0]], seconds).not_done

    def close(self) -> None:
        """Stop the thread and wait for it. Safe to call twice."""
        self._finalizer()


def _stop(pool: ThreadPoolExecutor, owner: weakref.ref[Prefetcher[Any]]) -> None:
    # the garbage collector runs in any thread, which must not wait
    pool.shutdown(wait=owner() is not None, cancel_futures=True)
