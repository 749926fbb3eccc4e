"""What an S3 request sends: a part of a local file without a copy in memory, and its digests."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import zlib
from typing import Any


class Slice(io.RawIOBase):
    """Bytes [start, stop) of an open file, read at positions of its own: no copy, any thread."""

    def __init__(self, handle: int, start: int, stop: int) -> None:
        self._handle, self._start, self._stop, self._at = handle, start, stop, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._at, self._stop - self._start)[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        at = self._start + self._at
        count = os.preadv(self._handle, [view[: max(0, min(len(view), self._stop - at))]], at)
        self._at += count
        return count


def digests(file: Any) -> tuple[str, str]:
    """Return the md5 in hex and the CRC-32 in base64, as S3 spells them, of an open file."""
    md5, crc = hashlib.md5(usedforsecurity=False), 0
    while chunk := file.read(1 << 20):
        md5.update(chunk)
        crc = zlib.crc32(chunk, crc)
    return md5.hexdigest(), base64.b64encode(crc.to_bytes(4, "big")).decode()
