"""One function over many items on several threads: the results come in the items' order.

For work that waits (reads of a remote store) or leaves the interpreter (hashing, decompression,
NumPy, Arrow). Never: a result without its error; the first one is raised, and what has not begun
by then does not begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                begun.append(pool.submit(function, item))
                if ahead is not None and len(begun) >= ahead:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
