"""One shard on disk: written once, checked at open, read by memory map.

    ids, offsets, document rows  ->  ShardWriter.append ... .commit  ->  four files, record last
    four files                   ->  Shard: size, header, digest of ends at open; 64 KiB blocks of
                                     the tokens checked on first touch

The format is specified in docs/reference/format.md. Never: scan for EOS ids, write through a
memory map (a full disk would be a SIGBUS), unpickle.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from olm_data.canonical import sha256_file
from olm_data.dataset.container import (
    HEADER_BYTES,
    Container,
    file_header,
    npy_header,
    tokens_header,
    tokens_suffix,
)
from olm_data.dataset.shuffle import document_order, shuffle_rows, shuffle_tokens
from olm_data.errors import ConflictError, ValidationError
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

Verify = Literal["off", "lazy", "full"]

BLOCK_BYTES = 1 << 16
DOCS_ROW_GROUP = 65_536
CAST_TOKENS = 1 << 20  # narrowed and written at a time
WINDOWS = tuple(1 << k for k in range(6, 21))  # 64 .. 1,048,576 tokens
ENDS, DOCS, RECORD = ".ends.npy", ".docs.parquet", ".json"


class FileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and sha256 of one file."""

    bytes: int
    sha256: str


class Blocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """zlib.crc32 of each `bytes`-sized block of the tokens file, 8 hex digits a block."""

    bytes: int
    crc32: str


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The commit record of a shard: it exists if and only if the three other files are complete."""

    version: int
    name: str
    plan: str
    tokens: int
    documents: int
    text_bytes: int
    max_token_id: int
    files: dict[str, FileInfo]
    blocks: Blocks
    units: list[dict[str, Any]]
    dropped: dict[str, int]
    windows: dict[str, list[int]]  # width -> [most document starts in a window, in the first, last]

    def encode(self) -> bytes:
        """Return the record's bytes as stored."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"


class _PlanOf(msgspec.Struct, frozen=True):
    """Of a commit record, only whose it is."""

    plan: str


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


def window_counts(ends: np.ndarray) -> dict[str, list[int]]:
    """Count document starts in windows of 64, 128, ... tokens of one shard.

    Args:
        ends: uint64 [documents], cumulative document ends in tokens.

    Returns:
        width -> [most starts in any window, starts in the first, in the last `width` tokens], up to
        the first width that covers the shard.
    """
    if not len(ends):
        return {}
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    tokens, rank = int(ends[-1]), np.arange(len(starts))
    counts = {}
    for width in WINDOWS:
        most = int((np.searchsorted(starts, starts + width) - rank).max())
        first = int(np.searchsorted(starts, width))
        last = len(starts) - int(np.searchsorted(starts, tokens - width))
        counts[str(width)] = [most, first, last]
        if width >= tokens:
            break
    return counts


class ShardWriter:
    """Writes one shard into a staging folder and publishes it with its record last.

    Args:
        store: dataset folder the shard is published in.
        name: `shard-00000` style name.
        dtype: uint16 or uint32.
        vocab_size: every id must be below it.
        staging: local folder for unfinished files (see `Store.staging`).
        keep: Arrow schema of the kept columns, or None.
        shuffle: seed of the order of the documents, or None for the order of `append`.
        container: whether the tokens have a NumPy header.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        dtype: np.dtype[Any],
        vocab_size: int,
        staging: Path,
        keep: pa.Schema | None = None,
        shuffle: int | None = None,
        container: Container = "npy",
    ) -> None:
        import pyarrow.parquet as pq

        self.store, self.name, self.dtype, self.vocab_size = (
            store,
            name,
            np.dtype(dtype),
            vocab_size,
        )
        self._container, self._tokens_kind = container, tokens_suffix(container)
        kinds = (self._tokens_kind, ENDS, DOCS)
        self._paths = {kind: staging / (name + kind) for kind in kinds}
        self._schema = docs_schema(keep)
        self._shuffle = shuffle
        self._ends: list[np.ndarray] = []
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._tokens = self._documents = self._text_bytes = 0
        self._max_token_id = -1
        with io_errors(store.url(name)):
            self._file = open(self._paths[self._tokens_kind], "wb", buffering=0)  # noqa: SIM115
            _write_all(self._file, bytes(tokens_header(container)))
            self._docs = pq.ParquetWriter(
                self._paths[DOCS], self._schema, compression="zstd", compression_level=1
            )

    @property
    def tokens(self) -> int:
        """Tokens appended so far."""
        return self._tokens

    def append(self, ids: np.ndarray, offsets: np.ndarray, docs: pa.RecordBatch) -> None:
        """Append documents in order.

        Args:
            ids: uint32 [n], the documents' tokens end to end, BOS and EOS included.
            offsets: int64 [d + 1] into `ids`; every document has at least one token.
            docs: d rows with the columns of `docs_schema`.

        Raises:
            ValidationError: an id is outside the vocabulary or a document is empty.
        """
        from olm_data.arrow_values import as_numpy

        documents = len(offsets) - 1
        assert docs.num_rows == documents
        if documents == 0:
            return
        if np.any(np.diff(offsets) <= 0):
            raise ValidationError("an empty document reached the writer", where=self.name)
        body = ids[offsets[0] : offsets[-1]]
        largest = int(body.max())
        if largest >= self.vocab_size:
            raise ValidationError(
                f"token id {largest} is outside the vocabulary of {self.vocab_size} entries",
                where=self.store.url(self.name),
                why="an embedding table has no row for it",
                fix="use the tokenizer.json the encoder was made from",
            )
        with io_errors(self.store.url(self.name)):
            for start in range(0, len(body), CAST_TOKENS):
                part = body[start : start + CAST_TOKENS].astype(self.dtype, copy=False)
                _write_all(self._file, part.view(np.uint8).data)
            self._pending.append(docs)
            self._pending_rows += documents
            while self._pending_rows >= DOCS_ROW_GROUP:
                self._write_docs(DOCS_ROW_GROUP)
        self._ends.append((offsets[1:] - offsets[0] + self._tokens).astype(np.uint64))
        self._tokens += len(body)
        self._documents += documents
        self._text_bytes += int(as_numpy(docs.column("text_bytes")).sum())
        self._max_token_id = max(self._max_token_id, largest)

    def commit(
        self, *, plan: str, units: Sequence[dict[str, Any]], dropped: dict[str, int]
    ) -> ShardRecord:
        """Make the shard durable and visible: tokens, ends, docs, then the record.

        An empty shard has a record but no other file. A late worker of the same plan writes the
        same bytes again; over the shard of another plan nothing is written.

        Raises:
            ConflictError: the folder holds this shard of another plan.
        """
        if stored_plan(self.store, self.name) not in (None, plan):
            raise self._other_plan()
        ends = np.concatenate(self._ends) if self._ends else np.zeros(0, np.uint64)
        where = self.store.url(self.name)
        with io_errors(where):
            self._write_docs(self._pending_rows)
            self._docs.close()
            self._file.seek(0)
            _write_all(self._file, file_header(self._container, self.dtype, self._tokens))
            os.fsync(self._file.fileno())
            self._file.close()
            if self._shuffle is not None and len(ends):
                order = document_order(self._shuffle, self.name, len(ends))
                tokens, header = self._paths[self._tokens_kind], tokens_header(self._container)
                ends = shuffle_tokens(tokens, header, self.dtype, ends, order)
                shuffle_rows(self._paths[DOCS], order, DOCS_ROW_GROUP)
            with open(self._paths[ENDS], "wb", buffering=0) as file:
                _write_all(file, npy_header(np.dtype(np.uint64), len(ends)))
                _write_all(file, ends.view(np.uint8).data)
                os.fsync(file.fileno())
            with open(self._paths[DOCS], "rb") as file:
                os.fsync(file.fileno())
            files = {
                kind.split(".")[1]: FileInfo(path.stat().st_size, sha256_file(path))
                for kind, path in self._paths.items()
            }
            crc32 = _block_checksums(self._paths[self._tokens_kind])
        record = ShardRecord(
            version=1,
            name=self.name,
            plan=plan,
            tokens=self._tokens,
            documents=self._documents,
            text_bytes=self._text_bytes,
            max_token_id=self._max_token_id,
            files=files if self._tokens else {},
            blocks=Blocks(BLOCK_BYTES, crc32 if self._tokens else ""),
            units=list(units),
            dropped=dict(sorted(dropped.items())),
            windows=window_counts(ends),
        )
        if self._tokens:
            for kind, path in self._paths.items():
                self.store.publish(self.name + kind, path, files[kind.split(".")[1]].sha256)
        try:
            self.store.create(self.name + RECORD, record.encode())
        except ConflictError as error:
            if stored_plan(self.store, self.name) not in (None, plan):
                raise self._other_plan() from error
            self.store.put(self.name + RECORD, record.encode())  # damaged, or of a lost shard
        return record

    def _other_plan(self) -> ConflictError:
        return ConflictError(
            "the output holds this shard of another plan",
            where=self.store.url(self.name + RECORD),
            why="another run, with other inputs or options, writes there",
            fix="stop that run, or choose another --output",
        )

    def discard(self) -> None:
        """Close the unfinished files; the staging folder's owner removes them."""
        self._file.close()
        self._docs.close()

    def _write_docs(self, rows: int) -> None:
        """Write the first `rows` pending rows: row groups must not depend on batches."""
        import pyarrow as pa

        if rows == 0:
            return
        table = pa.Table.from_batches(self._pending, schema=self._schema)
        self._docs.write_table(table.slice(0, rows), row_group_size=DOCS_ROW_GROUP)
        self._pending = table.slice(rows).to_batches()
        self._pending_rows -= rows


class Shard:
    """One opened shard.

    Args:
        store: dataset folder.
        name: shard name.
        dtype: dtype of the tokens, from the manifest.
        tokens: token count, from the manifest.
        documents: document count, from the manifest.
        sha256: digests by kind (`tokens`, `ends`, `docs`, `record`), from the manifest.
        verify: `lazy` checks each 64 KiB block of tokens on first touch, `full` all of them now.
        container: whether the tokens have a NumPy header, from the manifest.
        file: name of the token file where it is not the shard's own, from the manifest.
        mapped: read local files through memory maps; else by calls, which survive that a file is
            cut short or removed.

    Attributes:
        mapped: whether memory maps are used; never of a remote store.
        tokens_name: name of the token file in the store.

    Raises:
        ValidationError: size, header, ends or digest disagree with the manifest.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        dtype: np.dtype[Any],
        tokens: int,
        documents: int,
        sha256: dict[str, str],
        verify: Verify,
        container: Container = "npy",
        file: str | None = None,
        mapped: bool = True,
    ) -> None:
        self.mapped = mapped and not store.remote
        self.store, self.name, self.verify, self._sha256 = store, name, verify, sha256
        self.dtype, self._tokens, self._documents = np.dtype(dtype), tokens, documents
        self._record: ShardRecord | None = None
        self._unchecked: bytearray | None = None  # 1 a block that was not read yet; a byte each
        self._docs: Any = None
        self._docs_group: tuple[int, Any] = (-1, None)
        self.tokens_name = file or name + tokens_suffix(container)
        store.refuse_links(self.tokens_name, *(name + kind for kind in (ENDS, DOCS, RECORD)))
        self._header = tokens_header(container)
        header = file_header(container, self.dtype, tokens)
        self._check_file(self.tokens_name, header, tokens, self.dtype.itemsize)
        self.ends = self._read_ends()
        self._bytes: np.ndarray | None = None
        if self.mapped:
            path = store.url(self.tokens_name)
            self._bytes = np.memmap(path, np.uint8, "r").view(np.ndarray)
            self.tokens: np.ndarray = self._bytes[self._header :].view(self.dtype)
        if verify == "full":
            self.check(0, tokens)

    @property
    def record(self) -> ShardRecord:
        """The commit record, read and checked against the manifest on first use."""
        if self._record is None:
            url = self.store.url(self.name + RECORD)
            data = self._read_whole(RECORD)
            if _sha256(data) != self._sha256["record"]:
                raise _damaged(url, "the commit record does not match its digest in the manifest")
            try:
                record = msgspec.json.decode(data, type=ShardRecord)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise _damaged(url, f"the commit record is malformed: {error}") from error
            blocks, size = record.blocks, self._header + self._tokens * self.dtype.itemsize
            digits = 8 * -(-size // max(blocks.bytes, 1))
            if blocks.bytes < 1 or not re.fullmatch(f"[0-9a-f]{{{digits}}}", blocks.crc32):
                raise _damaged(url, "the commit record has no checksum for each block")
            self._record = record
        return self._record

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of this shard, checked; a view when the shard is local."""
        assert 0 <= start <= stop <= self._tokens
        if self._bytes is not None:
            self.check(start, stop)
            return self.tokens[start:stop]
        first, last = self._block_range(start, stop)
        size = self.record.blocks.bytes
        end = min(last * size, self._header + self._tokens * self.dtype.itemsize)
        data = self.store.read(self.tokens_name, first * size, end)
        if len(data) != end - first * size:
            raise _damaged(self.store.url(self.tokens_name), "the file ends early")
        if self.verify != "off":
            for block in range(first, last):
                self._check_block(block, data[(block - first) * size : (block - first + 1) * size])
        offset = self._header + start * self.dtype.itemsize - first * size
        return np.frombuffer(data, self.dtype, count=stop - start, offset=offset)

    def check(self, start: int, stop: int) -> None:
        """Check the blocks under tokens [start, stop) once; does nothing when `verify` is off.

        Raises:
            ValidationError: a block's checksum differs.
        """
        if self.verify == "off" or stop <= start or self._bytes is None:
            return
        size = self.record.blocks.bytes
        if self._unchecked is None:
            self._unchecked = bytearray(b"\1") * -(-len(self._bytes) // size)
        first, last = self._block_range(start, stop)
        while (block := self._unchecked.find(1, first, last)) >= 0:
            self._check_block(block, self._bytes[block * size : (block + 1) * size])
            self._unchecked[block] = 0

    def is_checked(self, starts: np.ndarray, width: int) -> np.ndarray:
        """Return which windows of tokens [start, start + width) `check` would pass without work.

        Args:
            starts: int64 [m], first token of each window.

        Returns:
            bool [m]; all true when `verify` is off, all false without a memory map.
        """
        if self._bytes is None or (self._unchecked is None and self.verify != "off"):
            return np.zeros(len(starts), bool)
        if self._unchecked is None or self._unchecked.find(1) < 0:
            return np.ones(len(starts), bool)
        left = np.append(0, np.cumsum(np.frombuffer(self._unchecked, np.uint8), dtype=np.int64))
        first, last = self._block_range(starts, starts + width)
        return left[first] == left[last]

    def document_row(self, number: int) -> dict[str, Any]:
        """Return the row of document `number` (of this shard) in `docs.parquet`."""
        group = number // DOCS_ROW_GROUP
        if self._docs_group[0] != group:
            with _docs_errors(self.store.url(self.name + DOCS)):
                table = self._docs_file().read_row_group(group)
                table.validate(full=True)  # its strings may be anything
                self._docs_group = (group, table)
        return self._docs_group[1].slice(number % DOCS_ROW_GROUP, 1).to_pylist()[0]

    def document_schema(self) -> pa.Schema:
        """Return the columns of `docs.parquet`."""
        return self._docs_file().schema_arrow

    def document_rows(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of `docs.parquet` in order, some columns of 65,536 at a time."""
        with _docs_errors(self.store.url(self.name + DOCS)):
            for batch in self._docs_file().iter_batches(DOCS_ROW_GROUP, columns=list(columns)):
                batch.validate(full=True)
                yield batch

    def docs(self) -> pa.Table:
        """Return all rows of `docs.parquet`."""
        import pyarrow.parquet as pq

        data = self._read_whole(DOCS)
        with _docs_errors(self.store.url(self.name + DOCS)):
            table = pq.read_table(io.BytesIO(data))
            table.validate(full=True)
            return table

    def _docs_file(self) -> Any:
        import pyarrow.parquet as pq

        if self._docs is None:
            data = self._read_whole(DOCS) if self.store.remote else None
            with _docs_errors(self.store.url(self.name + DOCS)):
                path = self.store.url(self.name + DOCS)
                self._docs = pq.ParquetFile(path if data is None else io.BytesIO(data))
        return self._docs

    def _block_range(self, start: Any, stop: Any) -> tuple[Any, Any]:
        size, item = self.record.blocks.bytes, self.dtype.itemsize
        return (self._header + start * item) // size, -(-(self._header + stop * item) // size)

    def _check_block(self, block: int, data: Any) -> None:
        expected = int(self.record.blocks.crc32[block * 8 : block * 8 + 8], 16)
        if zlib.crc32(data) != expected:
            size = self.record.blocks.bytes
            raise _damaged(
                self.store.url(self.tokens_name),
                f"bytes {block * size:,} to {block * size + len(data):,} have changed "
                "since they were written",
            )

    def _check_file(self, name: str, header: bytes, count: int, itemsize: int) -> None:
        """Check exact size and header, so that a truncated file is an error and never a SIGBUS."""
        url = self.store.url(name)
        size = self.store.size(name)
        expected = len(header) + count * itemsize
        if size is None:
            raise _damaged(url, "the file is missing")
        if size != expected:
            raise _damaged(url, f"the file has {size:,} bytes, not {expected:,}")
        if header and self.store.read(name, 0, len(header)) != header:
            raise _damaged(url, f"the NumPy header is not that of {count:,} values")

    def _read_ends(self) -> np.ndarray:
        header = npy_header(np.dtype(np.uint64), self._documents)
        self._check_file(self.name + ENDS, header, self._documents, 8)
        url = self.store.url(self.name + ENDS)
        if not self.mapped:
            data = np.frombuffer(self._read_whole(ENDS), np.uint8)
        else:  # mapped, so that thousands of open shards keep no ends in memory
            with io_errors(url):
                data = np.memmap(url, np.uint8, "r").view(np.ndarray)
        if self.verify != "off" and _sha256(data.data) != self._sha256["ends"]:
            raise _damaged(url, "the document ends do not match their digest in the manifest")
        ends = data[HEADER_BYTES:].view(np.uint64)
        if len(ends) and (ends[0] == 0 or np.any(ends[1:] <= ends[:-1])):
            raise _damaged(url, "the document ends do not rise")
        if (int(ends[-1]) if len(ends) else 0) != self._tokens:
            raise _damaged(url, f"the last document does not end at token {self._tokens:,}")
        return ends

    def _read_whole(self, kind: str) -> bytes:
        try:
            return self.store.read(self.name + kind)
        except FileNotFoundError as error:
            raise _damaged(self.store.url(self.name + kind), "the file is missing") from error


def stored_plan(store: Store, name: str) -> str | None:
    """Return the plan of a shard's commit record, None where there is none that can be read."""
    try:
        return msgspec.json.decode(store.read(name + RECORD), type=_PlanOf).plan
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write_all(file: Any, data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file: the kernel may accept less at a time."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def _block_checksums(path: Path) -> str:
    with open(path, "rb") as file:
        blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
        return "".join(f"{zlib.crc32(block):08x}" for block in blocks)


def _sha256(data: bytes | memoryview) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


@contextmanager
def _docs_errors(url: str) -> Iterator[None]:
    """Turn what Arrow says of a damaged `docs.parquet` into our error."""
    import pyarrow as pa

    with io_errors(url):
        try:
            yield
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
            raise _damaged(url, f"the document rows are damaged: {error}") from error
        except OSError as error:
            if error.errno is None:  # Arrow says what is wrong with bytes
                raise _damaged(url, f"the document rows are damaged: {error}") from error
            raise


def _damaged(url: str, what: str) -> ValidationError:
    return ValidationError(
        what,
        where=url,
        why="training on it would feed the model other tokens than were written",
        fix="restore the file from a copy, or tokenise its inputs again into a new output",
    )
