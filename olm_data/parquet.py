"""Parquet files that came from elsewhere: what they become in memory is known before it is decoded.

    file -> BoundedParquet: footer within bounds, flat columns
            `-> .group(columns): the header of each page --Thrift compact--> Page, then the rows

A few kilobytes of zstd may hold two gigabytes of zeros, and the footer's own sizes are what the
writer says. The header of a page is what the decompressor allocates by, so it is read first; the
bytes of pages are not. The fields are those of parquet.thrift in apache/parquet-format. Inputs,
whose pages may lie in a bucket, have bounds of their own (`sources/limits.py`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

MAX_RATIO = 500
"""Bytes that a stored byte of a column may become, as of text that is tokenised (`sources`)."""

FREE_BYTES = 16 << 20
"""Bytes of a file that are never too much, in all its columns and row groups together."""

ROW_BYTES = 16
"""Bytes of a value that are never too much: any number with its place fits."""

_MAX_FOOTER = 16 << 20  # bytes
_MAX_ITEMS = 1 << 15  # row groups, columns, ... : what a list of the footer may have

HEADER_BYTES = 1 << 15
"""Bytes a page header may have; statistics with the largest value that is written are in it."""

_MOST = (1 << 63) - 1  # bytes a file may have

DICTIONARY = 2
"""Type of the page that holds a dictionary."""

_TYPE, _SIZE, _STORED, _DATA, _DICTIONARY, _DATA_V2 = 1, 2, 3, 5, 7, 8
_MAX_DEPTH = 8  # of a page header


class _EndsEarly(ValueError):
    def __init__(self) -> None:
        super().__init__("a page header that ends early")


class Page(NamedTuple):
    """One page: its type (see `DICTIONARY`), bytes uncompressed and stored, and values."""

    kind: int
    size: int
    stored: int
    values: int


class BoundedParquet:
    """Reads row groups of an open file of flat columns.

    Args:
        file: seekable, of the whole file.

    Attributes:
        schema: the columns, strings as strings.
        metadata: key and value of each text in the footer.
        groups, rows: number of row groups, and the rows of each; the caller bounds them.

    Raises:
        ValueError: it is no such file; also from `group`.
        pyarrow.ArrowException, OSError: it is damaged; also from `group`.
    """

    def __init__(self, file: IO[bytes]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._raw = file
        self._past: dict[tuple[int, str], int] = {}  # bytes of a column past what its size allows
        self._check_footer()
        limits = {
            "thrift_string_size_limit": _MAX_FOOTER,
            "thrift_container_size_limit": _MAX_ITEMS,
        }
        plain = pq.ParquetFile(file, **limits)
        self._footer, self.schema = plain.metadata, plain.schema_arrow
        self.metadata: dict[bytes, bytes] = self._footer.metadata or {}
        self.groups = self._footer.num_row_groups
        self.rows = [self._footer.row_group(g).num_rows for g in range(self.groups)]
        if not self._footer.num_columns == len(set(self.schema.names)) == len(self.schema):
            raise ValueError("columns in columns, or two of one name")
        strings = [f.name for f in self.schema if pa.types.is_string(f.type)]
        self._file = pq.ParquetFile(
            file, metadata=self._footer, read_dictionary=strings, pre_buffer=False, **limits
        )

    def _check_footer(self) -> None:
        size = self._raw.seek(0, os.SEEK_END)
        self._raw.seek(max(size - 8, 0))
        tail = self._raw.read(8)
        if len(tail) < 8 or tail[4:] != b"PAR1":
            raise ValueError("it does not end as a parquet file does")
        if int.from_bytes(tail[:4], "little") > min(size, _MAX_FOOTER):
            raise ValueError("its footer is larger than it can be")

    def group(self, number: int, columns: Sequence[str]) -> pa.Table:
        """Return some columns of a row group; strings are dictionary arrays."""
        for name in columns:
            self._check_column(number, name)
        table = self._file.read_row_group(number, columns=list(columns), use_threads=False)
        table.validate(full=True)  # its strings may be anything
        if table.num_rows != self.rows[number]:
            raise ValueError(f"row group {number} holds {table.num_rows:,} rows")
        return table

    def _check_column(self, number: int, name: str) -> None:
        chunk = column_chunk(self._footer, number, self.schema.names.index(name))
        size = values = 0
        rows, stored = max(self.rows[number], 1), chunk.total_compressed_size
        for page in pages(self._raw, chunk):
            size += page.size
            values += 0 if page.kind == DICTIONARY else page.values
            if page.values > rows or values > rows:
                raise ValueError(f"column {name!r} has more values than rows")
            self._past[number, name] = max(0, size - max(ROW_BYTES * rows, MAX_RATIO * stored))
            if sum(self._past.values()) > FREE_BYTES:
                raise ValueError(
                    f"column {name!r} unpacks to more than {MAX_RATIO} times its size: "
                    "it may be a bomb"
                )


class _Unread(OSError):
    """The footer is in order: now bytes of a column would be read."""


class _NoBytes(io.RawIOBase):
    """A file as large as any, which nobody may read."""

    _place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int:
        self._place = _MOST if whence == os.SEEK_END else place
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1, /) -> bytes:
        raise _Unread


def column_chunk(footer: Any, group: int, column: int) -> Any:
    """Return what a footer says of a column chunk.

    pyarrow ends the process where that contradicts itself; its reader, which is asked first,
    raises.

    Raises:
        pyarrow.ArrowException, OSError: the footer is damaged.
    """
    import pyarrow.parquet as pq

    reader = pq.ParquetFile(_NoBytes(), metadata=footer, pre_buffer=False).reader
    with suppress(_Unread):
        reader.read_row_group(group, column_indices=[column], use_threads=False)
    return footer.row_group(group).column(column)


def first_page(chunk: Any) -> int:
    """Return the place of a column chunk's first page. Args: chunk: what the footer says of it."""
    places = [chunk.dictionary_page_offset, chunk.data_page_offset]
    return min((place for place in places if place is not None and place > 0), default=0)


def pages(file: IO[bytes], chunk: Any) -> Iterator[Page]:
    """Yield the pages of a column chunk.

    Args:
        file: with the chunk.
        chunk: what the footer says of it.

    Raises:
        ValueError: the headers are not such as can be read, or lead out of the chunk.
    """
    at = first_page(chunk)
    stop = at + chunk.total_compressed_size
    while at < stop:
        file.seek(at)
        head = file.read(min(HEADER_BYTES, stop - at))
        try:
            header = _Compact(head)
            fields = header.struct()
        except _EndsEarly:  # other writers put the largest value into it, however large
            header = _Compact(head + file.read(min(_MAX_FOOTER, stop - at) - len(head)))
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
        match kind:
            case 1 | 2:  # true, false: the value is the type
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._zigzag()
            case 7:
                return self._skip(8)
            case 8:
                return self._skip(self._varint())
            case 12:
                return self.struct(depth + 1)
        raise ValueError(f"a page header with a field of type {kind}")  # lists too: it has none

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise _EndsEarly

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise _EndsEarly
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
