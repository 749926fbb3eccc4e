"""An opened `docs.parquet`, whoever wrote it: its shape is checked before anything is decoded.

    file -> DocsFile: footer within bounds, row groups of 65,536, columns of the kinds that are kept
            `-> .group(columns): page headers first, then the rows, strings by dictionary

So a file takes no more memory than its rows can need, and a bomb of a few kilobytes is refused. A
string that stands in many rows is held once; it is copied out (`dense`) some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from olm_data.parquet import BoundedParquet

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP = 65_536
DENSE_BYTES = 16 << 20
"""Bytes of strings copied out at a time; one row may have more."""


class DocsFile(BoundedParquet):
    """Reads row groups of an open file.

    Args:
        file: seekable, of the whole file.
        documents: how many rows it must have.

    Raises:
        ValueError: the file is not such as `DocsWriter` writes; also from `group`.
        pyarrow.ArrowException, OSError: it is damaged; also from `group`.
    """

    def __init__(self, file: IO[bytes], documents: int) -> None:
        import pyarrow as pa

        super().__init__(file)
        kinds = (pa.types.is_integer, pa.types.is_string, pa.types.is_float64, pa.types.is_boolean)
        if not all(any(kind(f.type) for kind in kinds) for f in self.schema):
            raise ValueError("columns of a kind that is never kept")
        wanted = [min(ROW_GROUP, documents - low) for low in range(0, documents, ROW_GROUP)]
        if self.rows != wanted:
            raise ValueError(
                f"{sum(self.rows):,} rows in {self.groups:,} groups, not {documents:,}"
            )


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
