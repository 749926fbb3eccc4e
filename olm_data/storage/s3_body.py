"""Streams of S3: a part of a local file to send, without a copy in memory, and its digests."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import zlib
from typing import Any


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
        self._handle, self._start = handle, start

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = view[: max(0, min(len(view), self._size - self._at))]
        count = os.preadv(self._handle, [wanted], self._start + self._at)
        self._at += count
        return count


def digests(file: Any) -> tuple[str, str]:
    """Return the md5 in hex and the CRC-32 in base64, as S3 spells them, of an open file."""
    md5, crc = hashlib.md5(usedforsecurity=False), 0
    while chunk := file.read(1 << 20):
        md5.update(chunk)
        crc = zlib.crc32(chunk, crc)
    return md5.hexdigest(), base64.b64encode(crc.to_bytes(4, "big")).decode()
