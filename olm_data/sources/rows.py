"""Rows of somebody's own code, texts or records, as documents.

code --rows--> strings or mappings, some at a time --tables--> Arrow tables --> documents
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from olm_data.dataset.account import DROP_REASONS, SKIP_REASONS
from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.errors import InputError, OlmError, printable, said_by
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.columns import kinds_of, table_batches, table_schema

ROWS = 256
"""Rows taken at a time; batches are cut by bytes afterwards."""

ROWS_BYTES = 8 << 20
"""Text, about, after which no more rows are taken."""

Row = str | Mapping[str, Any]
"""A text, or a record with its text in a column."""


@dataclass(frozen=True, slots=True)
class NoRow:
    """A record that is no document.

    Attributes:
        reason: a key of `DROP_REASONS`, or of `SKIP_REASONS`.
        detail, raw: as of `Drop`.
    """

    reason: str
    detail: str = ""
    raw: bytes = b""


def tables_of(
    start: Callable[[], Iterable[Row | NoRow]], what: str, input: InputFile, text_column: str
) -> Iterator[pa.RecordBatch | NoRow]:
    """Yield the rows of code of somebody's own as tables, and between them what is none.

    Args:
        start: gives the rows.
        what: the code, for messages.
        input: what is read.
        text_column: where a row that is a text goes.

    Raises:
        InputError: the code fails, or gives what is no row.
    """
    with running(what, input.path):
        rows = iter(start())
    some: list[Row] = []
    size = 0
    while True:
        with running(what, input.path):
            row = next(rows, _END)
        if not isinstance(row, NoRow):
            some.append(row)
            size += _size(row, text_column)
            if len(some) < ROWS and size < ROWS_BYTES:
                continue
        if some:
            yield table_of(some, text_column, input)
        some, size = [], 0
        if row is _END:
            return
        if isinstance(row, NoRow):
            yield row


_END = NoRow("")


def _size(row: Any, text: str) -> int:
    value = row.get(text) if isinstance(row, Mapping) else row
    return len(value) if isinstance(value, str | bytes) else 0


def documents_of(tables: Iterable[pa.RecordBatch | NoRow], scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of the one unit that an input is."""
    row = 0
    none: list[tuple[int, NoRow]] = []
    for table in chain(tables, [_END]):
        past = table is _END or scan.is_past(row)
        if isinstance(table, NoRow) and not past:
            none.append((row, table))
            row += 1
            if len(none) < ROWS and not table.raw:
                continue
        if none:
            yield _without(none, scan)
            none = []
        if past:
            return
        if isinstance(table, NoRow):
            continue
        table_schema(table.schema, scan.input, scan.options)
        positions = np.arange(row, row + len(table), dtype=np.int64)
        row += len(table)
        yield from table_batches(scan, table, positions)


def columns_of(
    tables: Iterable[pa.RecordBatch | NoRow], input: InputFile, options: ReadOptions
) -> ColumnKinds:
    """Return the columns of the first table. Raises as `table_schema`."""
    first = next((table for table in tables if not isinstance(table, NoRow)), None)
    if first is None:
        return {options.text_column: {"string"}}
    return kinds_of(table_schema(first.schema, input, options))


def _without(found: Sequence[tuple[int, NoRow]], scan: Scan) -> DocumentBatch:
    bad = [(place, row) for place, row in found if row.reason in DROP_REASONS]
    others = Counter((scan.index, row.reason) for _, row in found if row.reason in SKIP_REASONS)
    drops = [scan.drop(row.reason, place, printable(row.detail), row.raw) for place, row in bad]
    return DocumentBatch.without_documents(dropped=tuple(drops), skipped=others, rows_in=len(found))


def _record(row: Any, text: str, input: InputFile) -> dict[str, Any]:
    if isinstance(row, str):
        return {text: row}
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise InputError(
            f"a row is of type {type(row).__name__}, neither a text nor a record",
            where=input.path,
            fix="let rows yield strings, or mappings with string keys",
        )
    return dict(row)


def table_of(some: Sequence[Row], text: str, input: InputFile) -> pa.RecordBatch:
    """Return rows as a table, whose texts may be no UTF-8.

    Raises:
        InputError: one is no row, or a column has values of several types.
    """
    rows = [_record(row, text, input) for row in some]
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [row.get(name) for row in rows] for name in names}
    texts = found.get(text)
    if texts is not None and all(isinstance(value, str | bytes | None) for value in texts):
        # a lone surrogate is then no UTF-8, and counted as such
        data = [t.encode(errors="surrogatepass") if isinstance(t, str) else t for t in texts]
        found[text] = pa.array(data, pa.large_binary())
    try:
        return pa.RecordBatch.from_pydict(found)
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        raise InputError(
            "the values of a column are of several types", where=input.path, why=said_by(error)
        ) from error


@contextmanager
def running(what: str, where: str) -> Iterator[None]:
    """Turn what goes wrong in code of somebody's own into an error that names it."""
    try:
        yield
    except OlmError:
        raise
    except Exception as error:
        raise InputError(
            f"{what} fails: {type(error).__name__}: {said_by(error)}", where=where
        ) from error
