"""One function over many items on several threads: the results come in the items' order.

For work that waits (reads of a remote store) or leaves the interpreter (hashing, decompression,
NumPy, Arrow). Nor a wait inside the garbage collector: that runs in whatever thread, in the middle
of whatever it holds, so a wait there may be for that very thread.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

READERS = 16
"""Requests at a time: remote stores answer slowly, but many at a time."""


def in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int = READERS,
    *,
    ahead: int | None = None,
) -> Iterator[Result]:
    """Yield `function(item)` for each item. Nothing is done before the first result is asked for.

    Args:
        function: called on `threads` threads at a time.
        ahead: most items begun whose results were not taken, so that results that wait take
            bounded memory; None for all.
    """
    begun: deque[Future[Result]] = deque()
    pool, wait = ThreadPoolExecutor(threads), True
    try:
        for item in items:
            begun.append(pool.submit(function, item))
            if ahead is not None and len(begun) >= ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    except GeneratorExit:  # nobody asks any more; it may be the garbage collector that says so
        wait = False
        raise
    finally:
        pool.shutdown(wait, cancel_futures=True)


_leaving: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Told to stop by the garbage collector, and not waited for by it."""


def end_of(threads: Sequence[threading.Thread], owner: weakref.ref[Any]) -> None:
    """Wait for daemon threads that were told to stop; for finalizers (`weakref.finalize`).

    Where their owner was collected they are waited for when the interpreter ends, and not here.
    """
    if owner() is None:
        _leaving.update(threads)
        return
    for thread in threads:
        thread.join()


def _wait_for_leaving() -> None:
    for thread in list(_leaving):
        thread.join()


atexit.register(_wait_for_leaving)
