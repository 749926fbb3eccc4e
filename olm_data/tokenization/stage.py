"""Stages of a task that overlap: each runs in a thread of its own, ahead of the one that follows.

    with Stage(read(...), ...) as batches, Stage(encode(batches), ..., after=batches) as encoded:
        for item in encoded: write(item)

    thread 1: read --(bounded by bytes)--> thread 2: encode --(bounded by bytes)--> caller: write

Order is kept, so that what is made does not depend on timing. Reading, decompression, the encoders
and writing leave the interpreter's lock while they work; so a slow disk or network costs no time
that another stage can use.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from time import perf_counter
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Stage(Generic[T]):
    """Iterates over `items`, which are made in a thread of their own.

    The next item is made only while the items not yet done with (waiting, or the one in the
    consumer's hands) are below `limit` together: one item of any size passes, alone.

    Args:
        items: makes the items; it is used, and closed, in the thread only.
        size: bytes of an item.
        limit: bytes of items to have made and not yet done with.
        after: the stage that `items` takes from, if it is one too; it is stopped with this one.

    Raises:
        Whatever `items` raises, once, where the next item would have come.
    """

    def __init__(
        self,
        items: Generator[T, None, None],
        *,
        size: Callable[[T], int],
        limit: int,
        after: Stage[Any] | None = None,
    ) -> None:
        self.busy = 0.0
        """Seconds the stage was at work, without the time it waited for the stage before it."""
        self.idle = 0.0
        """Seconds the consumer waited for this stage."""
        self._items, self._size, self._limit, self._after = items, size, limit, after
        self._waiting: deque[tuple[T, int]] = deque()
        self._held = 0  # bytes waiting and in the consumer's hands
        self._in_hand = 0  # of these, in the consumer's hands
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Stage[T]:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._thread.join()
        self._waiting.clear()

    def stop(self) -> None:
        """Make no more items, and end the iteration of whoever waits for one."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._after is not None:
            self._after.stop()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        start = perf_counter()
        with self._changed:
            self._held -= self._in_hand  # asking for the next says that the last is done with
            self._in_hand = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._ended or self._stopped)
            self.idle += perf_counter() - start
            if self._waiting and not self._stopped:
                item, self._in_hand = self._waiting.popleft()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def _work(self) -> None:
        try:
            while self._has_room():
                if not self._make():
                    break
            self._items.close()
        except BaseException as error:  # whatever it is, the consumer must see it
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._held < self._limit or self._stopped)
            return not self._stopped

    def _make(self) -> bool:
        """Make one item; False if there is none. It is not kept here while the next is made."""
        start, waited = perf_counter(), self._waited()
        try:
            item = next(self._items)
        except StopIteration:
            return False
        finally:
            self.busy += perf_counter() - start - (self._waited() - waited)
        size = self._size(item)
        with self._changed:
            self._waiting.append((item, size))
            self._held += size
            self._changed.notify_all()
        return True

    def _waited(self) -> float:
        return 0.0 if self._after is None else self._after.idle
