"""The document rows of a shard, `shard-00000.docs.parquet`: where each document came from.

    record batches of any size -> DocsWriter -> row groups of 65,536 -> DocumentRows, checked

Columns: id, input, position, text_bytes, content_hash, then those the user kept. Specified in
docs/reference/format.md.

Also: an opened `docs.parquet`, whoever wrote it: its shape is checked before anything is decoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from olm_data.dataset.record import damaged
from olm_data.errors import OlmError, UsageError, ValidationError, printable, suggest
from olm_data.parquet import BoundedParquet
from olm_data.storage.disk import io_errors
from olm_data.storage.names import is_column_name
from olm_data.storage.store import Store

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


def no_column(name: str, known: Sequence[str], where: str, purpose: str = "") -> UsageError:
    """Return the error that documents have no column of this name; `known` may have been meant."""
    return UsageError(
        f"the documents have no column {printable(name)!r}{purpose}",
        where=where,
        fix=f"{suggest(name, known)}; a column is there if tokenize got --keep NAME",
    )


DOCS = ".docs.parquet"
MAX_BYTES = 2 << 30
"""Bytes of a `docs.parquet` in a remote store: it is read as a whole."""


def docs_schema(keep: pa.Schema | None = None) -> pa.Schema:
    """Return the schema of `docs.parquet`: five columns, then the kept ones."""
    import pyarrow as pa

    fields = [
        pa.field("id", pa.string()),
        pa.field("input", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("text_bytes", pa.int64(), nullable=False),
        pa.field("content_hash", pa.uint64(), nullable=False),
    ]
    return pa.schema(fields + list(keep or []))


class DocsWriter:
    """Writes a `docs.parquet` whose bytes depend on its rows alone, not on the batches.

    As a context manager it ends with `finish`, or with `discard` where something was raised.

    Args:
        path: local file.
        schema: `docs_schema` with the kept columns.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self._schema = schema
        self._file = pq.ParquetWriter(path, schema, compression="zstd", compression_level=1)
        self._pending: list[pa.RecordBatch] = []
        self._rows = 0

    def __enter__(self) -> DocsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows; full row groups are written."""
        self._pending.append(rows)
        self._rows += rows.num_rows
        while self._rows >= ROW_GROUP:
            self._write(ROW_GROUP)

    def finish(self) -> None:
        """Write what is left and close the file."""
        self._write(self._rows)
        self._file.close()

    def discard(self) -> None:
        """Close the unfinished file."""
        self._file.close()

    def _write(self, rows: int) -> None:
        import pyarrow as pa

        if rows == 0:
            return
        table = pa.Table.from_batches(self._pending, schema=self._schema)
        self._file.write_table(table.slice(0, rows), row_group_size=ROW_GROUP)
        self._pending = table.slice(rows).to_batches()
        self._rows -= rows


KeptValue = str | int | float | bool | None
"""A value of a kept column."""


class DocumentRow(NamedTuple):
    """A row of `docs.parquet` without `content_hash`; `columns` are the kept ones."""

    id: str | None
    input: int
    position: int
    text_bytes: int
    columns: dict[str, KeptValue]


class DocumentRows:
    """Reads the `docs.parquet` of one shard; a file is open only while a method reads it.

    Args:
        store: dataset folder.
        name: of the shard.
        documents: rows it must have, from the manifest.

    Raises:
        ValidationError: from each method: the file is missing, damaged, or not such as is written.
    """

    def __init__(self, store: Store, name: str, documents: int) -> None:
        self._store, self._name, self._documents = store, name + DOCS, documents
        self._url = store.url(self._name)
        self._schema: pa.Schema | None = None
        self._fetched: bytes | None = None  # of a remote store
        self._group: tuple[int, pa.Table] | None = None

    def row(self, number: int) -> DocumentRow:
        """Return where document `number` of the shard came from."""
        group, at_hand = number // ROW_GROUP, self._group
        with self._errors():
            if at_hand is None or at_hand[0] != group:
                with self._file() as file:
                    names = [name for name in file.schema.names if name != "content_hash"]
                    at_hand = self._group = (group, file.group(group, names))
            # Not `self._group`: another thread may have put another group there.
            values = at_hand[1].slice(number % ROW_GROUP, 1).to_pylist()[0]
            own = {name: values.pop(name) for name in DocumentRow._fields[:-1]}
            return DocumentRow(**own, columns=values)

    def schema(self) -> pa.Schema:
        """Return the columns."""
        if self._schema is None:
            with self._file() as file:
                self._schema = file.schema
        return self._schema

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, some columns of at most 65,536 at a time."""
        with self._file() as file:
            for group in range(file.groups):
                yield from dense(file.group(group, columns))

    def table(self, columns: Sequence[str]) -> pa.Table:
        """Return some columns of all rows."""
        import pyarrow as pa

        kinds = pa.schema([self.schema().field(name) for name in columns])
        return pa.Table.from_batches(self.batches(columns), kinds)

    @contextmanager
    def _file(self) -> Iterator[DocsFile]:
        with self._errors(), self._open() as raw:
            file = DocsFile(raw, self._documents)
            _check_columns(file.schema)
            yield file

    def _open(self) -> IO[bytes]:
        try:
            if not self._store.remote:
                return self._store.open(self._name)
            if self._fetched is None:
                self._fetched = self._store.read(self._name, limit=MAX_BYTES)
            return io.BytesIO(self._fetched)
        except FileNotFoundError as error:
            raise damaged(self._url, "the file is missing") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what is said of a damaged file into our error."""
        import pyarrow as pa

        def rows_damaged(error: Exception) -> ValidationError:
            said = printable(str(error).partition("\n")[0])[:200]
            return damaged(self._url, f"the document rows are damaged: {said}")

        with io_errors(self._url):
            try:
                yield
            except OlmError:
                raise
            except (pa.ArrowException, ValueError, KeyError) as error:
                raise rows_damaged(error) from error
            except OSError as error:
                if error.errno is None:  # Arrow says what is wrong with bytes
                    raise rows_damaged(error) from error
                raise


def _check_columns(schema: pa.Schema) -> None:
    """Refuse columns that are not those of `docs_schema` and then kept ones."""
    base = docs_schema()
    kinds = [(field.name, field.type, field.nullable) for field in schema]
    if kinds[: len(base)] != [(field.name, field.type, field.nullable) for field in base]:
        raise ValueError(f"its columns do not begin with {', '.join(base.names)}")
    if not all(map(is_column_name, schema.names)):
        raise ValueError("the name of a column holds control characters, or is too long")
