"""Waiting for another process: the one place where a test may sleep, and never without an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(look: Callable[[], Found], what: str, *, seconds: float = 600) -> Found:
    """Return the first true value of `look`, asked every 5 ms.

    The limit is for what never comes: no machine is so busy that a test waits for so long.

    Raises:
        TimeoutError: there was none in `seconds`; names `what` was waited for.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {seconds:g} s")
        time.sleep(0.005)
    return found
