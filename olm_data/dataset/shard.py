"""One shard on disk: written once, checked at open, read by memory map.

    ids, offsets, document rows  ->  ShardWriter.append ... .commit  ->  four files, record last
    four files                   ->  Shard: size, header, digest of ends at open; 64 KiB blocks of
                                     the tokens checked on first touch

Tokens and ends are read and written here, document rows in docs.py, the record in record.py.

The format is specified in docs/reference/format.md. Never: scan for EOS ids, write through a
memory map (a full disk would be a SIGBUS), unpickle.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from olm_data.canonical import sha256_file
from olm_data.dataset.container import (
    HEADER_BYTES,
    Container,
    file_header,
    mapped_bytes,
    npy_header,
    tokens_header,
    tokens_suffix,
)
from olm_data.dataset.docs import DOCS, DocsWriter, DocumentRows, docs_schema
from olm_data.dataset.record import (
    BLOCK_BYTES,
    RECORD,
    Blocks,
    FileInfo,
    ShardRecord,
    damaged,
    stored_plan,
    window_counts,
)
from olm_data.dataset.shuffle import document_order, shuffle_rows, shuffle_tokens
from olm_data.errors import ConflictError, ValidationError
from olm_data.regular_files import MAX_WHOLE
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

Verify = Literal["off", "lazy", "full"]

CAST_TOKENS = 1 << 20  # narrowed and written at a time
ENDS = ".ends.npy"


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
        self.store, self.name, self.vocab_size = store, name, vocab_size
        self.dtype = np.dtype(dtype)
        self._container, self._tokens_kind = container, tokens_suffix(container)
        kinds = (self._tokens_kind, ENDS, DOCS)
        self._paths = {kind: staging / (name + kind) for kind in kinds}
        self._shuffle = shuffle
        self._ends: list[np.ndarray] = []
        self._tokens = self._documents = self._text_bytes = 0
        self._max_token_id = -1
        with io_errors(store.url(name)):
            self._file = open(self._paths[self._tokens_kind], "wb", buffering=0)  # noqa: SIM115
            _write_all(self._file, bytes(tokens_header(container)))
            self._docs = DocsWriter(self._paths[DOCS], docs_schema(keep))

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
            self._docs.append(docs)
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
            self._docs.finish()
            self._file.seek(0)
            _write_all(self._file, file_header(self._container, self.dtype, self._tokens))
            os.fsync(self._file.fileno())
            self._file.close()
            if self._shuffle is not None and len(ends):
                order = document_order(self._shuffle, self.name, len(ends))
                tokens, header = self._paths[self._tokens_kind], tokens_header(self._container)
                ends = shuffle_tokens(tokens, header, self.dtype, ends, order)
                shuffle_rows(self._paths[DOCS], order)
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
        self._docs.discard()


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
        docs: the rows of its documents.
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
        self.docs = DocumentRows(store, name, documents)
        self.tokens_name = file or name + tokens_suffix(container)
        store.refuse_links(self.tokens_name, *(name + kind for kind in (ENDS, DOCS, RECORD)))
        self._header = tokens_header(container)
        header = file_header(container, self.dtype, tokens)
        self._check_file(self.tokens_name, header, tokens, self.dtype.itemsize)
        self.ends = self._read_ends()
        self._bytes: np.ndarray | None = None
        if self.mapped:
            self._bytes = mapped_bytes(store, self.tokens_name)
            self.tokens: np.ndarray = self._bytes[self._header :].view(self.dtype)
        if verify == "full":
            self.check(0, tokens)

    @property
    def record(self) -> ShardRecord:
        """The commit record, read and checked against the manifest on first use."""
        if self._record is None:
            self._record = ShardRecord.decode(
                self._read_whole(RECORD),
                self.store.url(self.name + RECORD),
                sha256=self._sha256["record"],
                token_bytes=self._header + self._tokens * self.dtype.itemsize,
            )
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
            raise damaged(self.store.url(self.tokens_name), "the file ends early")
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

    def _block_range(self, start: Any, stop: Any) -> tuple[Any, Any]:
        size, item = self.record.blocks.bytes, self.dtype.itemsize
        return (self._header + start * item) // size, -(-(self._header + stop * item) // size)

    def _check_block(self, block: int, data: Any) -> None:
        if zlib.crc32(data) != self.record.blocks.crc(block):
            size = self.record.blocks.bytes
            raise damaged(
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
            raise damaged(url, "the file is missing")
        if size != expected:
            raise damaged(url, f"the file has {size:,} bytes, not {expected:,}")
        if header and self.store.read(name, 0, len(header)) != header:
            raise damaged(url, f"the NumPy header is not that of {count:,} values")

    def _read_ends(self) -> np.ndarray:
        header = npy_header(np.dtype(np.uint64), self._documents)
        self._check_file(self.name + ENDS, header, self._documents, 8)
        url = self.store.url(self.name + ENDS)
        if not self.mapped:
            size = len(header) + 8 * self._documents
            data = np.frombuffer(self._read_whole(ENDS, size), np.uint8)
        else:  # mapped, so that thousands of open shards keep no ends in memory
            data = mapped_bytes(self.store, self.name + ENDS)
        if self.verify != "off" and _sha256(data.data) != self._sha256["ends"]:
            raise damaged(url, "the document ends do not match their digest in the manifest")
        ends = data[HEADER_BYTES:].view(np.uint64)
        if len(ends) and (ends[0] == 0 or np.any(ends[1:] <= ends[:-1])):
            raise damaged(url, "the document ends do not rise")
        if (int(ends[-1]) if len(ends) else 0) != self._tokens:
            raise damaged(url, f"the last document does not end at token {self._tokens:,}")
        return ends

    def _read_whole(self, kind: str, limit: int = MAX_WHOLE) -> bytes:
        try:
            return self.store.read(self.name + kind, limit=limit)
        except FileNotFoundError as error:
            raise damaged(self.store.url(self.name + kind), "the file is missing") from error


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
