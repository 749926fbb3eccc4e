"""Stages that overlap: order kept, memory bounded, errors seen once, no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.tokenization.pipeline import TaskStage


def one_by_one(values: Iterable[int]) -> Generator[int, None, None]:
    yield from values


@given(st.lists(st.integers(0, 9)), st.integers(1, 12), st.integers(1, 12))
def test_all_items_come_in_order_through_two_stages(
    values: list[int], first_limit: int, second_limit: int
) -> None:
    def doubled(items: Iterable[int]) -> Generator[int, None, None]:
        for item in items:
            yield 2 * item

    with (
        TaskStage(one_by_one(values), size=int, limit=first_limit) as first,
        TaskStage(doubled(first), size=int, limit=second_limit, after=first) as second,
    ):
        assert list(second) == [2 * value for value in values]


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 10))
def test_what_is_made_and_not_done_with_is_below_the_limit_before_another_is_made(
    sizes: list[int], limit: int
) -> None:
    made: list[int] = []
    done: list[int] = []
    over: list[tuple[int, int]] = []

    def make() -> Generator[int, None, None]:
        for size in sizes:
            # what the consumer is done with only grows, so this never says too little
            if sum(made) - sum(done) >= limit:
                over.append((sum(made), sum(done)))
            made.append(size)
            yield size

    with TaskStage(make(), size=int, limit=limit) as items:
        last = 0
        for size in items:
            done.append(last)
            last = size
    assert made == sizes
    # `done` is noted after the next item is there, so one item more may seem to be held
    assert all(made_ - done_ < limit + max(sizes) for made_, done_ in over)


def test_an_item_larger_than_the_limit_passes_alone() -> None:
    with TaskStage(one_by_one([1000, 1, 2000]), size=int, limit=10) as items:
        assert list(items) == [1000, 1, 2000]


def test_an_error_comes_once_after_the_items_before_it_and_through_later_stages() -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        raise KeyError("second")

    before = threading.active_count()
    with (
        TaskStage(failing(), size=int, limit=9) as first,
        TaskStage(one_by_one(first), size=int, limit=9, after=first) as second,
    ):
        assert next(second) == 1
        with pytest.raises(KeyError, match="second"):
            next(second)
        assert next(second, None) is None
    assert threading.active_count() == before


def test_an_error_that_is_no_exception_comes_too() -> None:
    class Panic(BaseException):
        pass

    def panicking() -> Generator[int, None, None]:
        raise Panic
        yield 0

    with pytest.raises(Panic), TaskStage(panicking(), size=int, limit=9) as items:
        next(items)


def test_an_error_of_the_consumer_ends_the_stages_and_closes_what_they_read() -> None:
    closed = threading.Event()

    def endless() -> Generator[int, None, None]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    def consume() -> None:
        with (
            TaskStage(endless(), size=int, limit=3) as first,
            TaskStage(one_by_one(first), size=int, limit=3, after=first) as second,
        ):
            for _ in second:
                raise OSError("disk full")

    before = threading.active_count()
    with pytest.raises(OSError, match="disk full"):
        consume()
    assert closed.is_set()
    assert threading.active_count() == before


def test_a_stage_that_waits_for_one_that_is_stuck_ends_when_the_consumer_leaves() -> None:
    release, waiting = threading.Event(), threading.Event()

    def stuck() -> Generator[int, None, None]:
        yield 1
        waiting.set()
        release.wait()

    first = TaskStage(stuck(), size=int, limit=9)
    with first:
        with TaskStage(one_by_one(first), size=int, limit=9, after=first) as second:
            assert next(second) == 1
            waiting.wait()
        # here the second stage has ended although the first gave it nothing
        release.set()
