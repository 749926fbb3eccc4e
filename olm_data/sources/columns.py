"""What parquet, Arrow and hub tables share: the check for columns, and tables to batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import as_mask
from olm_data.dataset.inputs import InputFile, ReadOptions, keep_type
from olm_data.errors import InputError, printable, suggest
from olm_data.select.evaluate import check_types, matches
from olm_data.select.where import columns
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.buffers import from_column
from olm_data.sources.limits import MAX_BATCH_BYTES
from olm_data.sources.nested import flat_schema, flat_table
from olm_data.sources.values import as_kept, decoded_bytes, kept_columns, kind_of


def used_columns(options: ReadOptions) -> list[str]:
    """Return the columns that are read, the text first, each once."""
    tested = [] if options.condition is None else columns(options.condition)
    kept = [name for name, _ in options.keep]
    names = [options.text_column, *filter(None, [options.id_column]), *kept, *tested]
    return list(dict.fromkeys(names))


def table_schema(
    found: pa.Schema, input: InputFile, options: ReadOptions, *, typed: bool = True
) -> pa.Schema:
    """Return a table's schema with the fields of its structs as columns, if it can be read.

    Args:
        typed: False for a table of texts, whose values are compared as what they spell.

    Raises:
        InputError: there is no text column (names those there are), a column that is read is there
            twice, or is of a type that `options.where` cannot decide.
    """
    schema = flat_schema(found, input.path, used_columns(options))
    if options.text_column not in schema.names:
        known = [printable(name) for name in schema.names[:40]]
        raise InputError(
            f"there is no column {options.text_column!r} for the text",
            where=input.path,
            why=f"its columns are: {', '.join(known)}",
            fix=f"say --text-column COLUMN ({suggest(options.text_column, known)})",
        )
    if typed and options.condition is not None:
        check_types(options.condition, schema, input.path)
    return schema


def kinds_of(schema: pa.Schema) -> ColumnKinds:
    """Return the type to keep each column as."""
    return {field.name: {kind_of(field.type)} for field in schema}


def table_batches(
    scan: Scan, table: pa.RecordBatch, positions: np.ndarray, chosen: np.ndarray | None = None
) -> Iterator[DocumentBatch]:
    """Yield the documents of a record batch; columns it does not have are null.

    Args:
        positions: int64[rows]; rows after the last one to read are left out.
        chosen: bool[rows], where `options.where` is true, if it is known already.
    """
    input, options = scan.input, scan.options
    table = flat_table(table, used_columns(options))
    text = table.column(options.text_column)
    if len(text) > 1 and decoded_bytes(text) > MAX_BATCH_BYTES:
        half = len(text) // 2
        for part in (slice(0, half), slice(half, None)):
            yield from table_batches(
                scan, table[part], positions[part], None if chosen is None else chosen[part]
            )
        return
    names = table.schema.names
    if input.until is not None and len(positions) and positions[-1] > input.until:
        rows = int(np.searchsorted(positions, input.until, side="right"))
        table, positions = table.slice(0, rows), positions[:rows]
        chosen = None if chosen is None else chosen[:rows]
    filtered = 0
    if options.where is not None:
        chosen = chosen_rows(table, options) if chosen is None else chosen
        filtered = len(chosen) - int(chosen.sum())
    if chosen is not None and filtered:
        table, positions = table.filter(as_mask(chosen)), positions[chosen]

    def column(name: str, kind: str) -> pa.Array:
        found = table.column(name) if name in names else pa.nulls(len(table), keep_type(kind))
        return as_kept(found, kind, name, input.path)

    yield from from_column(
        scan,
        table.column(options.text_column),
        positions=positions,
        ids=None if options.id_column is None else column(options.id_column, "string"),
        keep=kept_columns(options, column),
        filtered=filtered,
    )


def chosen_rows(table: pa.RecordBatch, options: ReadOptions) -> np.ndarray:
    """Return bool[rows]: `options.where` is true. Needs its columns only."""
    assert options.condition is not None
    table = flat_table(table, columns(options.condition))
    wanted = [name for name in columns(options.condition) if name in table.schema.names]
    return matches(options.condition, {name: table.column(name) for name in wanted}, len(table))
