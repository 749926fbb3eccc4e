"""Compressed files as streams, in bounded memory: gzip, zstd, xz, bzip2.

    file, codec         -> decompressed -> read(n)
    bytes, codec, limit -> unpacked     -> bytes, no more than `limit`

No other module unpacks what somebody else packed (`tests/test_read_sites.py`).

Frames that follow each other are one stream. Zero bytes after the last one, as tape tools and block
devices leave them, are no data of gzip, xz and bzip2, as for those programs.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any, Protocol

MOST_WINDOW = 128 << 20
"""Bytes of memory that a frame may ask for."""

_STORED = 256 << 10
_PIECE = 1 << 20
_DEFECTS = (lzma.LZMAError, zlib.error, OSError, EOFError)


class ByteStream(Protocol):
    """What can be read once, from the start."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; nothing at the end."""
        ...


def buffered(stream: ByteStream, size: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Return a stream as a binary file; `size` bytes are read at a time."""
    return io.BufferedReader(_Raw(stream), size)


class DecompressionError(Exception):
    """A compressed file is truncated or damaged, or asks for too much memory."""


def decompressed(file: IO[bytes], codec: str) -> ByteStream:
    """Return the content of a compressed file as a stream with `read(n)`.

    Args:
        codec: gzip, zlib, zstd, xz or bz2.
    """
    if codec in ("gzip", "zlib"):
        bits = zlib.MAX_WBITS + (16 if codec == "gzip" else 0)
        return _Stream(file, lambda: _ZlibDecompressor(bits))
    if codec == "xz":
        return _Stream(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, MOST_WINDOW), padding=4)
    if codec == "bz2":
        return _Stream(file, bz2.BZ2Decompressor)
    import pyarrow as pa  # what opens a dataset unpacks by zlib and does without

    stream: ByteStream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)
    return stream


def unpacked(stored: bytes, codec: str, limit: int) -> bytes:
    """Return the content of compressed bytes.

    Args:
        codec: see `decompressed`.
        limit: bytes it may have at most.

    Raises:
        DecompressionError: they are truncated or damaged, or unpack to more.
    """
    stream, data = decompressed(io.BytesIO(stored), codec), bytearray()
    while more := stream.read(min(limit + 1 - len(data), _PIECE)):
        data += more
        if len(data) > limit:
            raise DecompressionError(f"it unpacks to more than {limit:,} bytes: it may be a bomb")
    return bytes(data)


def readable(file: IO[bytes], codec: str) -> io.BufferedReader:
    """Return the content of a compressed file as a file of which lines can be read."""
    return buffered(decompressed(file, codec))


class _Raw(io.RawIOBase):
    """A stream with `read(n)` only, for `io.BufferedReader`."""

    def __init__(self, stream: ByteStream) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _ZlibDecompressor:
    """One gzip member or zlib stream, with the interface of `bz2.BZ2Decompressor`."""

    def __init__(self, bits: int) -> None:
        self._member = zlib.decompressobj(bits)
        self._waiting = b""

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    @property
    def needs_input(self) -> bool:
        return not (self.eof or self._waiting)

    def decompress(self, stored: bytes, size: int) -> bytes:
        """Return up to `size` bytes; for 0 the input only waits."""
        if size == 0:  # which means "all there is" to zlib
            self._waiting += stored
            return b""
        data = self._member.decompress(self._waiting + stored, size)
        self._waiting = self._member.unconsumed_tail
        return data


class _Stream:
    """Streams of one codec, one after another; `read` only.

    Args:
        padding: so many zero bytes, or a multiple, may stand between and after the streams.
    """

    def __init__(self, file: IO[bytes], start: Callable[[], Any], *, padding: int = 1) -> None:
        self._file, self._start, self._padding = file, start, padding
        self._decoder = start()
        self._begun = False

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; nothing at the end.

        Raises:
            DecompressionError: the file is truncated or damaged.
        """
        while True:
            while self._decoder.eof:
                if not self._next():
                    return b""
            stored = self._file.read(_STORED) if self._decoder.needs_input else b""
            if self._decoder.needs_input and not stored:
                if self._begun:
                    raise DecompressionError("the compressed data ends too early")
                return b""
            self._begun = True
            try:
                data: bytes = self._decoder.decompress(stored, size)
            except _DEFECTS as error:
                raise DecompressionError(str(error)) from error
            if data:
                return data

    def _next(self) -> bool:
        """Begin the next stream; False where there is none."""
        rest, zeros = self._decoder.unused_data or self._file.read(_STORED), 0
        while rest.startswith(b"\0"):
            data = rest.lstrip(b"\0")
            zeros += len(rest) - len(data)
            rest = data or self._file.read(_STORED)
        if zeros % self._padding:
            raise DecompressionError(f"{zeros:,} zero bytes after the end of the data")
        if not rest:
            return False
        self._decoder = self._start()
        try:
            self._decoder.decompress(rest, 0)  # it keeps what comes out until it is asked
        except _DEFECTS as error:
            raise DecompressionError(f"after the end of the data: {error}") from error
        return True
