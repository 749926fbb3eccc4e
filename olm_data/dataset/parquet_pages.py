"""What the pages of a parquet column would become in memory, told from their headers alone.

    column chunk (offset, bytes) --header of each page, Thrift compact--> Page(...) of each

A few kilobytes of zstd may hold two gigabytes of zeros, and the footer's own sizes are what the
writer says. The header of a page is what the decompressor allocates by, so it is read first; the
bytes of pages are not. The fields are those of parquet.thrift in apache/parquet-format. Pure: bytes
in, numbers out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

HEADER_BYTES = 1 << 15
"""Bytes a page header may have; statistics with the largest value that is written are in it."""

_TYPE, _SIZE, _STORED, _DATA, _DICTIONARY, _DATA_V2 = 1, 2, 3, 5, 7, 8
_MAX_DEPTH, _MAX_ITEMS = 8, 1000


class Page(NamedTuple):
    """One page: its type (2: dictionary), bytes uncompressed and stored, and values."""

    kind: int
    size: int
    stored: int
    values: int


def pages(read: Callable[[int, int], bytes], start: int, size: int) -> Iterator[Page]:
    """Yield the pages of a column chunk.

    Args:
        read: returns up to `n` bytes at a place of the file.
        start: place of the chunk's first page.
        size: bytes of all its pages with their headers.

    Raises:
        ValueError: the headers are not such as can be read, or lead out of the chunk.
    """
    at, stop = start, start + size
    while at < stop:
        header = _Compact(read(at, min(HEADER_BYTES, stop - at)))
        fields = header.struct()
        page = Page(
            kind=_number(fields, _TYPE),
            size=_number(fields, _SIZE),
            stored=_number(fields, _STORED),
            values=_values(fields),
        )
        at += header.at + page.stored
        if min(page) < 0 or at > stop:
            raise ValueError("a page leads out of its column")
        yield page


def _values(fields: dict[int, Any]) -> int:
    known = [fields[key] for key in (_DATA, _DICTIONARY, _DATA_V2) if key in fields]
    if len(known) != 1 or not isinstance(known[0], dict):
        raise ValueError("a page of an unknown kind")
    return _number(known[0], 1)


def _number(fields: dict[int, Any], key: int) -> int:
    value = fields.get(key)
    if not isinstance(value, int):
        raise ValueError(f"a page header without field {key}")
    return value


class _Compact:
    """Reads Thrift's compact protocol: a struct as a dict from field number to value."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields of the struct at the current place."""
        if depth > _MAX_DEPTH:
            raise ValueError("a page header nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            fields[number] = self._value(head & 0x0F, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # true, false: the value is the type
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._varint())
        if kind in (9, 10):
            return self._items(depth)
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"a page header with a field of type {kind}")

    def _items(self, depth: int) -> None:
        head = self._byte()
        count = self._varint() if head >> 4 == 15 else head >> 4
        if count > _MAX_ITEMS:
            raise ValueError("a page header with too long a list")
        for _ in range(count):
            if head & 0x0F in (1, 2):
                self._byte()
            else:
                self._value(head & 0x0F, depth + 1)

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise ValueError("a page header that ends early")

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise ValueError("a page header that ends early")
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a page header with too wide a number")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
