"""What parquet, Arrow and hub tables share: the check for columns, and tables to batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import as_mask
from olm_data.dataset.inputs import InputFile, ReadOptions, keep_type
from olm_data.errors import InputError, printable, suggest
from olm_data.select.evaluate import check_types, matches
from olm_data.select.where import columns
from olm_data.sources.base import DocumentBatch
from olm_data.sources.buffers import from_column
from olm_data.sources.nested import flat_table
from olm_data.sources.values import as_ids, as_kept, batch_of


def used_columns(options: ReadOptions) -> list[str]:
    """Return the columns that are read, the text first, each once."""
    tested = [] if options.condition is None else columns(options.condition)
    kept = [name for name, _ in options.keep]
    names = [options.text_column, *filter(None, [options.id_column]), *kept, *tested]
    return list(dict.fromkeys(names))


def require_text(names: Sequence[str], input: InputFile, options: ReadOptions) -> None:
    """Refuse a table without the text column.

    Raises:
        InputError: names the columns there are.
    """
    if options.text_column not in names:
        known = [printable(name) for name in names[:40]]
        raise InputError(
            f"there is no column {options.text_column!r} for the text",
            where=input.path,
            why=f"its columns are: {', '.join(known)}",
            fix=f"say --text-column COLUMN ({suggest(options.text_column, known)})",
        )


def table_batches(
    table: pa.RecordBatch,
    positions: np.ndarray,
    index: int,
    input: InputFile,
    options: ReadOptions,
    chosen: np.ndarray | None = None,
) -> Iterator[DocumentBatch]:
    """Yield the documents of a record batch; columns it does not have are null.

    Args:
        positions: int64[rows]; rows past `input.until` are left out.
        index: index of the input in the plan's list.
        chosen: bool[rows], where `options.where` is true, if it is known already.
    """
    table = flat_table(table, used_columns(options))
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

    def column(name: str, kind: pa.DataType) -> pa.Array:
        return table.column(name) if name in names else pa.nulls(len(table), kind)

    ids = keep = None
    if options.id_column is not None:
        ids = as_ids(column(options.id_column, pa.string()), input.path)
    if options.keep:
        kept = [
            as_kept(column(name, keep_type(kind)), kind, name, input.path)
            for name, kind in options.keep
        ]
        keep = batch_of(input, options, kept)
    yield from from_column(
        table.column(options.text_column),
        input_index=index,
        positions=positions,
        ids=ids,
        keep=keep,
        where=input.path,
        batch_bytes=options.batch_bytes,
        on_invalid=options.on_invalid,
        filtered=filtered,
    )


def chosen_rows(table: pa.RecordBatch, options: ReadOptions) -> np.ndarray:
    """Return bool[rows]: `options.where` is true. Needs its columns only."""
    assert options.condition is not None
    table = flat_table(table, columns(options.condition))
    wanted = [name for name in columns(options.condition) if name in table.schema.names]
    return matches(options.condition, {name: table.column(name) for name in wanted}, len(table))


def require_decidable(schema: pa.Schema, input: InputFile, options: ReadOptions) -> None:
    """Refuse a table whose columns are of types that `options.where` cannot decide.

    Raises:
        InputError: names the column and its type.
    """
    if options.condition is not None:
        check_types(options.condition, schema, input.path)
