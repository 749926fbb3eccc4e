"""Trying again: bounded exponential backoff with full jitter, for what can fail in passing.

    action -> error -> transient? -> wait up to first * 2^n, at most `most` -> action ...
                    -> not transient, or too often, or too late: the error

Full jitter (M. Brooker, "Exponential Backoff And Jitter", 2015) keeps many workers that failed
together from coming back together. Time is monotonic: a jump of the clock changes nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How often to try, and how long to wait.

    Attributes:
        attempts: most attempts, the first one included.
        first: the longest wait before the second attempt, in seconds; each next one doubles.
        most: the longest wait, in seconds.
        within: no attempt starts later than this many seconds after the first one.
    """

    attempts: int = 10
    first: float = 0.2
    most: float = 20.0
    within: float = 300.0

    def longest(self, attempt: int) -> float:
        """Return the longest wait in seconds after attempt number `attempt` (1, 2, ...)."""
        return min(self.most, self.first * 2.0 ** (attempt - 1))


def retried(
    action: Callable[[int], T],
    backoff: Backoff,
    transient: Callable[[Exception], bool],
    failed: Callable[[Exception, int, float], None],
) -> T:
    """Return what `action(attempt)` returns once it does not fail.

    Args:
        action: what to try; it gets the number of the attempt, from 1.
        backoff: the bounds.
        transient: whether it may help to try again after this error.
        failed: told of each error that another attempt follows: error, attempt, seconds so far.

    Raises:
        Exception: the last error of `action`, unchanged.
    """
    start = time.monotonic()
    attempt = 1
    while True:
        try:
            return action(attempt)
        except Exception as error:
            seconds = time.monotonic() - start
            wait = random.uniform(0, backoff.longest(attempt))
            late = seconds + wait > backoff.within
            if attempt >= backoff.attempts or late or not transient(error):
                raise
            failed(error, attempt, seconds)
        time.sleep(wait)
        attempt += 1
