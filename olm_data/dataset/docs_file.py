"""An opened `docs.parquet`, whoever wrote it: its shape is checked before anything is decoded.

    file -> DocsFile: footer within bounds, row groups of 65,536, columns of the kinds that are kept
            `-> .group(columns): page headers first, then the rows, strings by dictionary

So a file takes no more memory than its rows can need, and a bomb of a few kilobytes is refused. A
string that stands in many rows is held once; it is copied out (`dense`) some rows at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from olm_data.dataset.parquet_pages import pages

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP = 65_536
MAX_RATIO = 500
"""Bytes that a stored byte of a column may become, as of text that is tokenised (`sources`)."""

FREE_BYTES = 4 << 20
"""Bytes of a column in a row group that are never too much: 65,536 rows of plain numbers fit."""

DENSE_BYTES = 16 << 20
"""Bytes of strings copied out at a time; one row may have more."""

_MAX_FOOTER = 16 << 20  # bytes
_MAX_ITEMS = 1 << 15  # row groups, columns, ... : what a list of the footer may have


class DocsFile:
    """Reads row groups of an open file.

    Args:
        file: seekable, of the whole file.
        documents: how many rows it must have.

    Attributes:
        schema: the columns, strings as strings.
        groups: number of row groups.

    Raises:
        ValueError: the file is not such as `DocsWriter` writes; also from `group`.
        pyarrow.ArrowException, OSError: it is damaged; also from `group`.
    """

    def __init__(self, file: IO[bytes], documents: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._raw = file
        self._check_footer()
        limits = {
            "thrift_string_size_limit": _MAX_FOOTER,
            "thrift_container_size_limit": _MAX_ITEMS,
        }
        plain = pq.ParquetFile(file, **limits)
        self._metadata, self.schema = plain.metadata, plain.schema_arrow
        self.groups = self._metadata.num_row_groups
        kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_float64, pa.types.is_boolean)
        flat = self._metadata.num_columns == len(set(self.schema.names)) == len(self.schema)
        if not flat or not all(any(kind(f.type) for kind in kinds) for f in self.schema):
            raise ValueError("columns of a kind that is never kept, or two of one name")
        rows = [self._metadata.row_group(g).num_rows for g in range(self.groups)]
        wanted = [min(ROW_GROUP, documents - low) for low in range(0, documents, ROW_GROUP)]
        if rows != wanted:
            raise ValueError(f"{sum(rows):,} rows in {len(rows):,} groups, not {documents:,}")
        strings = [field.name for field in self.schema if pa.types.is_string(field.type)]
        self._file = pq.ParquetFile(
            file, metadata=self._metadata, read_dictionary=strings, pre_buffer=False, **limits
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
        if table.num_rows != self._metadata.row_group(number).num_rows:
            raise ValueError(f"row group {number} holds {table.num_rows:,} rows")
        return table

    def _check_column(self, number: int, name: str) -> None:
        group = self._metadata.row_group(number)
        chunk = group.column(self.schema.names.index(name))
        places = [chunk.dictionary_page_offset, chunk.data_page_offset]
        start = min(place for place in places if place is not None and place > 0)
        size = values = 0
        for page in pages(self._read_at, start, chunk.total_compressed_size):
            size += page.size
            values += 0 if page.kind == 2 else page.values
            most = max(group.num_rows, 1)
            if page.values > most or values > most:
                raise ValueError(f"column {name!r} has more values than rows")
            if size > max(FREE_BYTES, MAX_RATIO * chunk.total_compressed_size):
                raise ValueError(
                    f"column {name!r} unpacks to more than {MAX_RATIO} times its size: "
                    "it may be a bomb"
                )

    def _read_at(self, place: int, count: int) -> bytes:
        self._raw.seek(place)
        return self._raw.read(count)


def dense(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield the rows with strings as strings, as many at a time as is good for the memory."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from olm_data.arrow_values import as_numpy

    rows = rows.combine_chunks()
    if rows.num_rows == 0:
        return
    sizes = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        if pa.types.is_dictionary(column.type):
            values = column.chunk(0)
            lengths = as_numpy(pc.binary_length(values.dictionary).cast(pa.int64()))
            found = values.indices.fill_null(0)
            if len(lengths):
                sizes += np.where(as_numpy(values.is_valid()), lengths[as_numpy(found)], 0)
    fields = [
        pa.field(f.name, f.type.value_type, f.nullable) if pa.types.is_dictionary(f.type) else f
        for f in rows.schema
    ]
    ends = np.cumsum(sizes)
    low = 0
    while low < rows.num_rows:
        before = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + DENSE_BYTES, side="right")))
        part = rows.slice(low, high - low)
        columns = [
            c.combine_chunks().cast(c.type.value_type) if pa.types.is_dictionary(c.type) else c
            for c in part.columns
        ]
        yield from pa.table(columns, pa.schema(fields)).combine_chunks().to_batches()
        low = high
