"""Work on several threads is taken in order, in bounded memory, and ends with the first error."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import environment

from olm_data.threads import in_order


@given(st.lists(st.integers()), st.integers(1, 5), st.none() | st.integers(1, 7))
def test_results_come_in_the_order_of_the_items(
    items: list[int], threads: int, ahead: int | None
) -> None:
    assert list(in_order(lambda n: n * 2, items, threads, ahead=ahead)) == [n * 2 for n in items]


def test_no_more_are_begun_than_may_be_ahead() -> None:
    given_out = []

    def items() -> Iterator[int]:
        for n in range(100):
            given_out.append(n)
            yield n

    results = in_order(str, items(), 2, ahead=4)
    assert [next(results) for _ in range(10)] == [str(n) for n in range(10)]
    assert len(given_out) == 13
    results.close()


def test_items_are_worked_on_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=600)
    assert list(in_order(lambda _: together.wait() >= 0, range(3), 3)) == [True] * 3


def test_the_first_error_is_raised_and_what_waits_is_not_begun() -> None:
    begun = []

    def work(n: int) -> int:
        begun.append(n)
        if n == 1:
            raise ValueError(n)
        return n

    results = in_order(work, range(1000), 1, ahead=3)
    assert next(results) == 0
    with pytest.raises(ValueError, match="1"):
        list(results)
    assert len(begun) <= 5


class Circle:
    """Keeps results until the collector runs."""

    def __init__(self, results: Iterator[int]) -> None:
        self.held, self.me = results, self


@pytest.mark.slow
def test_results_that_nobody_takes_may_be_collected_in_a_thread_that_works_on_them() -> None:
    dropped, done = threading.Event(), threading.Event()

    def work(number: int) -> int:
        if number:
            dropped.wait(600)
            gc.collect()
            done.set()
        return number

    gc.disable()
    try:
        circle = Circle(in_order(work, range(2), 2))
        assert next(circle.held) == 0
        del circle
        dropped.set()
        assert done.wait(600)
    finally:
        gc.enable()
    gc.collect()  # what the collector met in that thread is an error of this test


EXIT = """
import threading, weakref
from olm_data.threads import end_of

class Owner: pass

def work():
    said.wait(30)
    sum(range(10_000_000))
    print("whole", flush=True)

owner, said = Owner(), threading.Event()
known, thread = weakref.ref(owner), threading.Thread(target=work, daemon=True)
thread.start()
del owner
end_of([thread], known)
print("not waited for", flush=True)
said.set()
"""


def test_the_interpreter_waits_for_threads_that_the_collector_did_not_wait_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=600, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "not waited for\nwhole\n", "")
