"""The document rows of a shard, `shard-00000.docs.parquet`: where each document came from.

    record batches of any size -> DocsWriter -> row groups of 65,536 -> DocumentRows, checked

Columns: id, input, position, text_bytes, content_hash, then those the user kept. Specified in
docs/reference/format.md. Never: row groups that depend on how rows were handed over.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olm_data.dataset.record import damaged
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

DOCS = ".docs.parquet"
ROW_GROUP = 65_536


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


class DocumentRows:
    """Reads the `docs.parquet` of one shard; opened on first use.

    Raises:
        ValidationError: from each method: the file is missing or damaged.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name + DOCS
        self._url = store.url(self._name)
        self._opened: Any = None
        self._group: tuple[int, Any] = (-1, None)

    def row(self, number: int) -> dict[str, Any]:
        """Return where document `number` of the shard came from: its row without `content_hash`."""
        group = number // ROW_GROUP
        with self._errors():
            if self._group[0] != group:
                names = [name for name in self.schema().names if name != "content_hash"]
                self._group = (group, self._file().read_row_group(group, columns=names))
            row = self._group[1].slice(number % ROW_GROUP, 1)
            row.validate(full=True)  # its strings may be anything
        return row.to_pylist()[0]

    def schema(self) -> pa.Schema:
        """Return the columns."""
        return self._file().schema_arrow

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, some columns of 65,536 at a time."""
        with self._errors():
            for batch in self._file().iter_batches(ROW_GROUP, columns=list(columns)):
                batch.validate(full=True)
                yield batch

    def table(self) -> pa.Table:
        """Return all rows."""
        import pyarrow.parquet as pq

        data = self._read_whole()
        with self._errors():
            table = pq.read_table(io.BytesIO(data))
            table.validate(full=True)
            return table

    def _file(self) -> Any:
        import pyarrow.parquet as pq

        if self._opened is None:
            data = self._read_whole() if self._store.remote else None
            with self._errors():
                self._opened = pq.ParquetFile(self._url if data is None else io.BytesIO(data))
        return self._opened

    def _read_whole(self) -> bytes:
        try:
            return self._store.read(self._name)
        except FileNotFoundError as error:
            raise damaged(self._url, "the file is missing") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what Arrow says of a damaged file into our error."""
        import pyarrow as pa

        with io_errors(self._url):
            try:
                yield
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
                raise damaged(self._url, f"the document rows are damaged: {error}") from error
            except OSError as error:
                if error.errno is None:  # Arrow says what is wrong with bytes
                    raise damaged(self._url, f"the document rows are damaged: {error}") from error
                raise
