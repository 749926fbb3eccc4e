"""CSV and TSV with a header: one record a row, quoted fields may hold line breaks.

    bytes -> lines -> csv.reader -> rows of the header's length -> Arrow columns -> buffers

Quotes decide where a row ends, so a file is one unit and its rows are counted. A row that is no row
of the table is a drop with a reason; a quote that is never closed is an error, as all that follows
it would be one field. Values are text: empty is empty text, and null for a kept number.
"""

from __future__ import annotations

import csv
import io
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import strings
from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.decompress import ByteStream, buffered
from olm_data.errors import InputError, printable
from olm_data.select.evaluate import matches
from olm_data.select.where import leaves
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.columns import kinds_of, table_batches, table_schema, used_columns
from olm_data.sources.files import open_stream, reading
from olm_data.sources.formats import CODECS, refuse_other_bytes, whole_file
from olm_data.storage.names import is_unicode

MOST_ROW = 8 << 20
"""Bytes of one row: a quote that is not closed must not take the memory."""

MOST_COLUMNS = 10_000
_PIECE = 1 << 20
_BOM = "\ufeff"
_TRUTHS = {"true": True, "false": False}


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """A table is one unit; an empty file is none."""
    return whole_file(index, input) if input.bytes else []


def read(scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of a table.

    Raises:
        InputError: the file is damaged, has no such text column, or a quote is never closed.
    """
    with _open(scan.input, scan.options) as table:
        table_schema(table.schema(), scan.input, scan.options, typed=False)
        rows: list[list[str]] = []
        positions: list[int] = []
        size = 0
        for position, row, length in table.rows():
            if scan.is_past(position):
                break
            if not isinstance(row, str):
                rows.append(row)
                positions.append(position)
                size += length
                if size < scan.options.batch_bytes:
                    continue
            yield from _batches(scan, table, rows, positions)
            rows, positions, size = [], [], 0
            if isinstance(row, str):
                drop = scan.drop("malformed", position, row, table.raw())
                yield DocumentBatch.without_documents(dropped=(drop,), rows_in=1)
        yield from _batches(scan, table, rows, positions)


def columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Return the columns of the header, all of them text. Raises as `table_schema`."""
    with _open(input, options) as table:
        return kinds_of(table_schema(table.schema(), input, options, typed=False))


class _Table:
    """Rows of one open file.

    Attributes:
        names: the columns.
    """

    def __init__(self, stream: ByteStream, input: InputFile, delimiter: str) -> None:
        self._input = input
        self._lines = _Lines(stream, input)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)
        _, header, _ = next(self._numbered(), (0, list[str](), 0))
        if isinstance(header, str):
            raise InputError("the header is not a row", where=input.path, why=header)
        self.names = header
        if not all(is_unicode(name) and "\0" not in name for name in self.names):
            refuse_other_bytes(b",".join(map(_encoded, self.names)), input)
            raise InputError(
                "the header is not UTF-8",
                where=input.path,
                fix="write the file as UTF-8: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW",
            )
        if len(self.names) > MOST_COLUMNS:
            raise InputError(
                f"the header has {len(self.names):,} columns: is this a table?", where=input.path
            )

    def schema(self) -> pa.Schema:
        """Return the columns, all of them text."""
        return pa.schema([pa.field(name, pa.string()) for name in self.names])

    def rows(self) -> Iterator[tuple[int, list[str] | str, int]]:
        """Yield (number of the row, its fields or what is wrong with it, its length)."""
        for number, row, length in self._numbered():
            if not isinstance(row, str) and len(row) != len(self.names):
                row = f"{len(row):,} fields, the header has {len(self.names):,}"
            yield number, row, length

    def raw(self) -> bytes:
        """Return the bytes of the row that was yielded last."""
        return _encoded(self._lines.row.getvalue())

    def _numbered(self) -> Iterator[tuple[int, list[str] | str, int]]:
        number = 0
        while True:
            self._lines.forget()
            try:
                row: list[str] | str | None = next(self._reader, None)
            except csv.Error as error:
                if self._lines.at_end:
                    raise self._unclosed() from error
                row = printable(str(error))
            if row is None:
                return
            if row:  # blank lines are no records
                yield number, row, self._lines.size
                number += 1

    def _unclosed(self) -> InputError:
        return InputError(
            "a quoted field does not end before the file does",
            where=f"{self._input.path}, byte {self._lines.begin}",
            why="all that follows the quote would be one field",
            fix="close the quote; a quote inside a quoted field is written twice",
        )


class _Lines:
    """The lines of a stream with their line breaks, as text; bytes that are not UTF-8 are kept.

    Attributes:
        row: the lines given since `forget`.
        size: characters of them.
        begin: byte at which the first of them begins.
        at_end: the last line was given.
    """

    def __init__(self, stream: ByteStream, input: InputFile) -> None:
        file = buffered(stream, _PIECE)
        # newline="": a lone carriage return ends a line, too, and none is changed
        self._text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
        self._input, self._place = input, 0
        self.row, self.size = io.StringIO(newline=""), 0
        self.begin, self.at_end = 0, False

    def forget(self) -> None:
        """Begin a new row."""
        if self.size:
            self.row, self.size = io.StringIO(newline=""), 0
        self.begin = self._place

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        pieces: list[str] = []
        size = 0
        while piece := self._text.readline(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if self.size + size > MOST_ROW:
                raise InputError(
                    f"a row longer than {MOST_ROW:,} bytes",
                    where=f"{self._input.path}, byte {self.begin}",
                    why="it would have to fit into memory as a whole",
                    fix="is a quote not closed? texts as long as that: convert them to JSON Lines",
                )
            if piece[-1] in "\r\n":
                break
        if not pieces:
            self.at_end = True
            raise StopIteration
        line = "".join(pieces)
        if self._place == 0:
            line = line.removeprefix(_BOM)
        self._place += size if line.isascii() else len(_encoded(line))
        self.row.write(line)
        self.size += size
        return line


@contextmanager
def _open(input: InputFile, options: ReadOptions) -> Iterator[_Table]:
    csv.field_size_limit(MOST_ROW)  # of the process; the default is 128 KiB
    with open_stream(input) as stream, reading(input):
        yield _Table(stream, input, options.delimiter or _delimiter(input.url))


def _delimiter(name: str) -> str:
    stem, end = posixpath.splitext(name.lower())
    return "\t" if (posixpath.splitext(stem)[1] if end in CODECS else end) == ".tsv" else ","


def _batches(
    scan: Scan, table: _Table, rows: list[list[str]], positions: list[int]
) -> Iterator[DocumentBatch]:
    """Yield the documents of whole rows."""
    if not rows:
        return
    options = scan.options
    used = used_columns(options)
    place = {name: k for k, name in enumerate(table.names) if name in used}
    kinds = dict(options.keep)
    arrays = {}
    for name, k in place.items():
        values: list[Any] = [row[k] for row in rows]
        if name == options.text_column:
            arrays[name] = pa.array([_encoded(value) for value in values], pa.large_binary())
        else:
            if kinds.get(name, "string") != "string":
                values = [value or None for value in values]
            arrays[name] = strings(map(_plain, values))
    chosen = None
    if options.condition is not None:
        tested = {
            leaf.column: [_as_compared(row[place[leaf.column]], leaf.kinds) for row in rows]
            for leaf in leaves(options.condition)
            if leaf.column in place
        }
        chosen = matches(options.condition, tested, len(rows))
    batch = pa.RecordBatch.from_pydict(arrays)
    yield from table_batches(scan, batch, np.array(positions, np.int64), chosen)


def _as_compared(value: str, kinds: frozenset[str]) -> Any:
    """Return a field as what a condition compares it with; null if it is empty."""
    if not value:
        return None
    if "number" in kinds:
        for number in (int, float):
            try:
                return number(value)
            except ValueError:
                continue
    if "bool" in kinds:
        return _TRUTHS.get(value.lower(), value)
    return value


def _encoded(text: str) -> bytes:
    """Return the bytes that were read."""
    return text.encode(errors="surrogateescape")


def _plain(value: str | None) -> str | None:
    """Return an id or a kept value as UTF-8 can hold it."""
    if value is None or value.isascii():
        return value
    return _encoded(value).decode(errors="backslashreplace")
