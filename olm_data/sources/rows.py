"""Rows of somebody's own code, texts or records, as documents.

code --rows--> strings or mappings, some at a time --tables--> Arrow tables --> documents
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from olm_data.dataset.inputs import InputFile, ReadOptions
from olm_data.errors import InputError, OlmError, said_by
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.columns import kinds_of, table_batches, table_schema

ROWS = 256
"""Rows taken at a time; batches are cut by bytes afterwards."""

Row = str | Mapping[str, Any]
"""A text, or a record with its text in a column."""


def tables_of(
    start: Callable[[], Iterable[Row]], what: str, input: InputFile, text_column: str
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of code of somebody's own as tables.

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
    while True:
        with running(what, input.path):
            some = list(islice(rows, ROWS))
        if not some:
            return
        yield table_of(some, text_column, input)


def documents_of(tables: Iterable[pa.RecordBatch], scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of the one unit that an input is."""
    row = 0
    for table in tables:
        if scan.is_past(row):
            return
        table_schema(table.schema, scan.input, scan.options)
        positions = np.arange(row, row + len(table), dtype=np.int64)
        row += len(table)
        yield from table_batches(scan, table, positions)


def columns_of(
    tables: Iterable[pa.RecordBatch], input: InputFile, options: ReadOptions
) -> ColumnKinds:
    """Return the columns of the first table. Raises as `table_schema`."""
    first = next(iter(tables), None)
    if first is None:
        return {options.text_column: {"string"}}
    return kinds_of(table_schema(first.schema, input, options))


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
    if texts is not None and all(isinstance(value, str | None) for value in texts):
        # a lone surrogate is then no UTF-8, and counted as such
        data = [None if t is None else t.encode(errors="surrogatepass") for t in texts]
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
