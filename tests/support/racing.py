"""Threads that do things at the same time, as often as the interpreter can change between them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def restless() -> Iterator[None]:
    """Let the interpreter change threads at every chance it has."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def race(*functions: Callable[[int], object], rounds: int) -> None:
    """Call each function with 0, 1, ..., in a thread of its own, until the first has done `rounds`.

    Raises:
        BaseException: what one of them raised first.
    """
    errors: list[BaseException] = []
    begin, over = threading.Barrier(len(functions)), threading.Event()

    def run(function: Callable[[int], object]) -> None:
        number = 0
        begin.wait()
        try:
            while not over.is_set() and number < rounds:
                function(number)
                number += 1
        except BaseException as error:
            errors.append(error)
        if errors or function is functions[0]:
            over.set()

    threads = [threading.Thread(target=run, args=(each,)) for each in functions]
    with restless():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
