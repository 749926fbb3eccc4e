"""Parquet: row groups as units, only the wanted columns, text straight from Arrow's buffers.

footer -> row-group ranges (units) -> record batches of the wanted columns -> buffers

With a condition (`ReadOptions.where`) a row group goes through two sieves before its text is read:
its statistics, then the columns of the condition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, islice
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.dataset.plan import group as grouped
from olm_data.errors import InputError
from olm_data.parquet import DICTIONARY, column_chunk, pages
from olm_data.select.evaluate import matching_groups
from olm_data.select.where import columns as columns_of
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan
from olm_data.sources.columns import chosen_rows, kinds_of, table_batches, table_schema, too_much
from olm_data.sources.files import open_binary, reading
from olm_data.sources.limits import MAX_BATCH_BYTES, Expansion

_ROWS = 1 << 16  # that are looked at together


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """Cut a file into ranges of row groups of about `target_bytes` of text.

    Raises:
        InputError: it is no parquet file, or has no such text column.
    """
    with _open(input) as file:
        table_schema(file.schema_arrow, input, options)
        chunks = _text_chunks(input, file, options.text_column)
        sizes = [chunk.total_uncompressed_size for chunk in chunks]
        firsts = accumulate(_group_rows(file), initial=0)
        if input.until is not None:
            sizes = [
                size for size, first in zip(sizes, firsts, strict=False) if first <= input.until
            ]
    cuts = grouped(sizes, target_bytes)
    return [Unit(input=index, start=a, stop=b, bytes=sum(sizes[a:b])) for a, b in cuts]


def read(scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of the unit's row groups.

    Raises:
        InputError: the file is damaged or has no such text column.
    """
    input, unit, options = scan.input, scan.unit, scan.options
    expansion, stored = Expansion(input), 0
    with open_binary(input, ahead=False) as raw:
        file = opened(input, raw)
        found = table_schema(file.schema_arrow, input, options)
        kept = (name for name, _ in options.keep)
        wanted = dict.fromkeys([options.text_column, options.id_column, *kept])
        names = [name for name in wanted if name is not None and name in found.names]
        chunks = _text_chunks(input, file, options.text_column)
        row = sum(_group_rows(file)[: unit.start])
        possible = None
        if options.condition is not None:
            with reading(input):
                possible = matching_groups(options.condition, file.metadata, found)
        for group in range(unit.start, unit.stop):
            rows = file.metadata.row_group(group).num_rows
            if scan.is_past(row):
                break
            chosen = None
            if possible is not None:
                chosen = np.zeros(rows, bool)
                if group in possible:
                    chosen = _chosen(input, raw, file, group, options, found)
                if not chosen.any():
                    past = 0 if input.until is None else max(row + rows - 1 - input.until, 0)
                    row += rows
                    skipped = {(scan.index, "filtered"): rows - past}
                    yield DocumentBatch.without_documents(rows_in=rows - past, skipped=skipped)
                    continue
            start = row
            # Rows that make about a batch; unequal documents are cut to size afterwards.
            size = chunks[group].total_uncompressed_size
            step = max(1, min(rows, rows * options.batch_bytes // max(size, 1)))
            step = min(step, rows_at_once(input, raw, file, group, names))
            stored += chunks[group].total_compressed_size
            batches = file.iter_batches(
                batch_size=step, row_groups=[group], columns=names, use_threads=False
            )
            while True:
                with reading(input):
                    batch = next(batches, None)
                if batch is None:
                    break
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    beside = name != options.text_column  # which is cut into smaller batches
                    if beside and len(batch) > 1 and column.nbytes > MAX_BATCH_BYTES:
                        raise too_much(name, input.path)
                positions = np.arange(row, row + len(batch), dtype=np.int64)
                here = None if chosen is None else chosen[row - start : row - start + len(batch)]
                row += len(batch)
                for cut in table_batches(scan, batch, positions, here):
                    expansion.add(len(cut.data), stored)
                    yield cut
            if row - start != rows:
                raise InputError(
                    f"row group {group} holds {row - start:,} rows, its footer says {rows:,}",
                    where=input.path,
                    fix="copy or download the file again, or leave it out",
                )


def columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Return the columns of a file. Raises as `table_schema`."""
    with _open(input) as file:
        return kinds_of(table_schema(file.schema_arrow, input, options))


@contextmanager
def _open(input: InputFile) -> Iterator[pq.ParquetFile]:
    with open_binary(input, ahead=False) as raw:
        yield opened(input, raw)


def opened(input: InputFile, raw: IO[bytes]) -> pq.ParquetFile:
    """Return the parquet file in an open file, whose footer can be read."""
    with reading(input, raw):
        # A remote file is read in few large requests; a local one needs no look-ahead.
        file = pq.ParquetFile(raw, pre_buffer="://" in input.url)
        _ = file.schema_arrow.names  # they are decoded only now, and may be anything
        return file


def rows_at_once(
    input: InputFile, raw: IO[bytes], file: pq.ParquetFile, group: int, names: list[str]
) -> int:
    """Return how many rows of some columns can be decoded at a time in bounded memory: at least 1.

    Each row may be the largest value of the dictionary, and the footer says nothing about values.
    What it says of sizes is held against the headers of pages where those cost no request each.

    Raises:
        InputError: a column is larger than one of its stored size can be, or damaged.
    """
    largest, remote = 1, "://" in input.url
    for number in range(file.metadata.num_columns):
        path = file.metadata.schema.column(number).path
        if not any(f"{path}.".startswith(f"{name}.") for name in names):
            continue
        with reading(input):
            chunk = column_chunk(file.metadata, group, number)
        with reading(input, raw):
            try:
                found = list(islice(pages(raw, chunk), 1 if remote else None))
            except ValueError as error:
                raise pa.ArrowInvalid(str(error)) from error
        largest = max([largest, *(page.size for page in found if page.kind == DICTIONARY)])
        size = max(chunk.total_uncompressed_size, sum(page.size for page in found))
        Expansion(input).add(size, chunk.total_compressed_size)
    return MAX_BATCH_BYTES // largest + 1


def _chosen(
    input: InputFile,
    raw: IO[bytes],
    file: pq.ParquetFile,
    group: int,
    options: ReadOptions,
    found: pa.Schema,
) -> np.ndarray:
    """Return bool[rows]: which rows of a group meet the condition, from as little as tells it."""
    assert options.condition is not None
    wanted = [name for name in columns_of(options.condition) if name in found.names]
    step = min(rows_at_once(input, raw, file, group, wanted), _ROWS)
    with reading(input):
        batches = file.iter_batches(step, row_groups=[group], columns=wanted, use_threads=False)
        masks = [chosen_rows(batch, options) for batch in batches]
    return np.concatenate(masks) if masks else np.zeros(0, bool)


def _group_rows(file: pq.ParquetFile) -> list[int]:
    return [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]


def _text_chunks(input: InputFile, file: pq.ParquetFile, column: str) -> list[Any]:
    """Return the metadata of the text in each row group; of the first column where it is nested."""
    metadata = file.metadata
    paths = [metadata.schema.column(c).path for c in range(metadata.num_columns)]
    number = paths.index(column) if column in paths else 0
    with reading(input):
        return [column_chunk(metadata, group, number) for group in range(metadata.num_row_groups)]
