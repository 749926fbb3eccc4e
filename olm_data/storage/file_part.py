"""Streams to send: a part of a local file, read at positions of its own."""

from __future__ import annotations

import io
import os
from functools import partial
from typing import Any

_AT_ONCE = 1 << 20  # bytes; by itself Python takes 8 KiB


class Seekable(io.RawIOBase):
    """A stream of `_size` bytes to read, whose position is `_at`: what every such stream has."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, (0, self._at, self._size)[whence] + offset)
        return self._at


class Slice(Seekable):
    """Bytes [start, stop) of an open file, read at positions of its own: no copy, any thread."""

    def __init__(self, handle: int, start: int, stop: int) -> None:
        super().__init__(stop - start)
        self._handle = handle
        self.start, self.stop = start, stop

    @property
    def whole(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._handle).st_size

    def readall(self) -> bytes:
        return b"".join(iter(partial(self.read, _AT_ONCE), b""))

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = view[: max(0, min(len(view), self._size - self._at))]
        count = os.preadv(self._handle, [wanted], self.start + self._at)
        self._at += count
        return count
