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
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

READERS = 16
"""Requests at a time: remote stores answer slowly, but many at a time."""
SYSTEM = Path("/")
"""Of the files in which the system says what a process may use."""


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


def cgroup_quota(root: Path = SYSTEM) -> float | None:
    """Return the least quota of this process's cgroup and those above it, in cores."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            quotas.append(_quota(place))
            if place == base:
                break
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota not in ("max", "-1", "0") else None
    except (OSError, ValueError):
        return None
