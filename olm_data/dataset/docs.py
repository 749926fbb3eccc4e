"""The document rows of a shard, `shard-00000.docs.parquet`: where each document came from.

    record batches of any size -> DocsWriter -> row groups of 65,536 -> DocumentRows, checked

Columns: id, input, position, text_bytes, content_hash, then those the user kept. Specified in
docs/reference/format.md.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from olm_data.dataset.docs_file import ROW_GROUP, DocsFile, dense
from olm_data.dataset.record import damaged
from olm_data.errors import OlmError, ValidationError, printable
from olm_data.storage.disk import io_errors
from olm_data.storage.names import is_column_name
from olm_data.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

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
