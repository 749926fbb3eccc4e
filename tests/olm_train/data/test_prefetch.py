"""The background thread: order, bound, errors and shutdown."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from olm_data.errors import ValidationError
from olm_train.data.prefetch import Prefetcher


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "olm-prefetch"}


@pytest.mark.parametrize("depth", [1, 2, 7, 100])
def test_items_come_once_and_in_order_at_any_depth(depth):
    with Prefetcher(iter(range(50)), depth) as items:
        assert list(items) == list(range(50))
        with pytest.raises(StopIteration):
            next(items)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_thread_never_runs_further_ahead_than_the_depth(depth):
    made = 0
    blocked = threading.Event()
    taken = 0

    def produce() -> Iterator[int]:
        nonlocal made
        for item in range(20):
            # one item may be in the producer's hands besides the queue
            assert made <= taken + depth + 1
            made += 1
            if made == depth + 1:
                blocked.set()
            yield item

    with Prefetcher(produce(), depth) as items:
        assert blocked.wait(600)  # reached its bound with nothing taken
        for wanted in range(20):
            taken = wanted + 1
            assert next(items) == wanted
        with pytest.raises(StopIteration):
            next(items)


def test_an_error_is_raised_by_the_next_that_needed_the_item_and_keeps_its_parts():
    error = ValidationError("a block changed", where="shard-00003", fix="restore it")

    def produce() -> Iterator[int]:
        yield 1
        yield 2
        raise error

    with Prefetcher(produce(), 5) as items:
        assert next(items) == 1
        assert next(items) == 2
        for _ in range(2):  # it does not turn into an end of data
            with pytest.raises(ValidationError) as caught:
                next(items)
            assert caught.value is error


def test_close_ends_a_thread_that_waits_for_room():
    before = threads()
    items = Prefetcher(iter(range(1000)), 2)
    assert next(items) == 0
    items.close()
    items.close()
    assert threads() <= before
    with pytest.raises(RuntimeError, match="closed"):
        next(items)


class Circle:
    """Keeps a prefetcher until the collector runs."""

    def __init__(self, items: Iterator[int]) -> None:
        self.held, self.me = Prefetcher(items, 1), self


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The garbage collector runs where a test says so."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
def test_a_prefetcher_may_be_collected_in_its_own_thread():
    begun, dropped = threading.Event(), threading.Event()

    def produce() -> Iterator[int]:
        begun.set()
        dropped.wait(600)
        gc.collect()
        yield 1

    before = threads()
    circle = Circle(produce())
    begun.wait(600)
    (thread,) = threads() - before
    del circle
    dropped.set()
    thread.join(600)
    assert not thread.is_alive()
    gc.collect()  # what a finalizer raised is an error of this test


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
def test_a_prefetcher_is_collected_while_its_thread_waits_for_the_same_thread():
    begun, lock, got = threading.Event(), threading.Lock(), list[bool]()

    def produce() -> Iterator[int]:
        begun.set()
        got.append(lock.acquire(timeout=10))
        yield 1

    before = threads()
    with lock:
        circle = Circle(produce())
        begun.wait(600)
        (thread,) = threads() - before
        del circle
        gc.collect()
    thread.join(600)
    assert got == [True]


@pytest.mark.slow
def test_an_interpreter_exits_while_the_thread_waits():
    program = (
        "from itertools import count; from olm_train.data.prefetch import Prefetcher;"
        "items = Prefetcher(count(), 3); print(next(items), next(items))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1\n", "")


def test_a_depth_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Prefetcher(iter([]), 0)
