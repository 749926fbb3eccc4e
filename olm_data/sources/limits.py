"""How large an input may become: a small file that unpacks to a huge text is refused, not unpacked.

    stored bytes, text made of them -> Expansion.add     refuses above 500 to 1
    compressed stream               -> Bounded.read      the same, piece by piece

Honest text shrinks to a third or, in the most repetitive logs, to a fiftieth. The limits are rules
of the readers, not options: what exceeds them can be unpacked by hand first.
"""

from __future__ import annotations

from typing import IO

from olm_data.dataset.inputs import InputFile
from olm_data.decompress import ByteStream
from olm_data.errors import InputError
from olm_data.parquet import MAX_RATIO

FREE_BYTES = 64 << 20
"""Text below this is never too much, whatever the ratio."""

MAX_RECORD_BYTES = (1 << 31) - 1
"""Bytes of one line or document; libraries below count in 32 bits."""

MAX_BATCH_BYTES = 256 << 20
"""Bytes that the rows decoded at a time from a dictionary may become at worst."""


class Expansion:
    """Compares what comes out of one input with what is stored of it."""

    def __init__(self, input: InputFile) -> None:
        self._input, self._out = input, 0

    def add(self, out: int, stored: int) -> None:
        """Count `out` more bytes of text, made from `stored` bytes in all so far.

        Raises:
            InputError: it is more than text can be.
        """
        self._out += out
        if self._out > FREE_BYTES and self._out > MAX_RATIO * max(stored, 1):
            raise InputError(
                f"the file unpacks to more than {MAX_RATIO} times its size: it may be a bomb",
                where=f"{self._input.path}: {self._out:,} bytes from {stored:,}",
                why="a small file could fill the memory or the disk",
                fix="leave it out; if it is what you want, unpack it to plain JSON Lines first",
            )


class Bounded:
    """A decompressed stream that stops when it becomes too much. Has `read` only.

    Args:
        stream: with `read`, decompressed.
        stored: the file below it, with `tell`.
    """

    def __init__(self, stream: ByteStream, stored: IO[bytes], input: InputFile) -> None:
        self._stream, self._stored = stream, stored
        self._expansion = Expansion(input)

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; nothing at the end.

        Raises:
            InputError: see `Expansion.add`.
        """
        data = self._stream.read(size)
        self._expansion.add(len(data), self._stored.tell())
        return data


def check_record(size: int, input: InputFile, place: int) -> None:
    """Refuse a line or document that is larger than any can be.

    Args:
        size: its bytes, or those read of it so far.
        place: byte it begins at.

    Raises:
        InputError: it is.
    """
    if size > MAX_RECORD_BYTES:
        raise InputError(
            f"a line or document longer than {MAX_RECORD_BYTES:,} bytes",
            where=f"{input.path}, byte {place}",
            why="it would have to be in memory as a whole, several times",
            fix="is this file text, with line breaks? cut the document into parts",
        )
