"""One shard on disk: checked at open, read by memory map.

    its files  ->  Shard: size, header, digest of ends and labels at open; 64 KiB blocks of the
                   tokens checked on first touch

Tokens, ends and labels are read here and written in shard_writer.py; document rows are in docs.py,
the record in record.py. The format is specified in docs/reference/format.md. Never: scan for EOS
ids, unpickle.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, Literal

import msgspec
import numpy as np

from olm_data.dataset.docs import DocumentRows
from olm_data.dataset.manifest import Manifest, ShardInfo
from olm_data.dataset.record import (
    HEADER_BYTES,
    RECORD,
    ShardRecord,
    damaged,
    file_header,
    mapped_bytes,
    npy_header,
    tokens_header,
)
from olm_data.regular_files import MAX_DOCUMENT
from olm_data.storage.store import Store

Verify = Literal["off", "lazy", "full"]

ENDS, LABELS = ".ends.npy", ".labels.npy"


class Shard:
    """One opened shard.

    Args:
        store: folder with its files.
        manifest: that of its dataset, which says dtype and container of its tokens.
        info: what the manifest says of the shard itself.
        verify: `lazy` checks each 64 KiB block of tokens on first touch, `full` all of them now.
        mapped: read local files through memory maps; else by calls, which survive that a file is
            cut short or removed.

    Attributes:
        docs: the rows of its documents.
        ends: uint64 [documents], cumulative document ends in tokens.
        labels: uint64 [runs], ends of alternating runs of tokens, the first of which is not
            trained and may be empty; None: all are trained.
        mapped: whether memory maps are used; never of a remote store.
        tokens_name: name of the token file in the store.

    Raises:
        ValidationError: size, header, ends or digest disagree with the manifest.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        info: ShardInfo,
        *,
        verify: Verify,
        mapped: bool = True,
    ) -> None:
        self.mapped = mapped and not store.remote
        self.store, self.name, self.verify = store, info.name, verify
        self.dtype, self._tokens, self._sha256 = np.dtype(manifest.dtype), info.tokens, info.sha256
        self._record: ShardRecord | None = None
        self._unchecked: bytearray | None = None  # 1 a block that was not read yet; a byte each
        self.docs = DocumentRows(store, self.name, info.documents)
        self.tokens_name = manifest.tokens_name(info)
        self._header, self._size = tokens_header(manifest.container), manifest.tokens_bytes(info)
        header = file_header(manifest.container, self.dtype, info.tokens)
        self._check_file(self.tokens_name, header, info.tokens, self.dtype.itemsize)
        self.ends = self._read_rising(ENDS, info.documents, "document")
        if len(self.ends) and self.ends[0] == 0:
            raise damaged(store.url(self.name + ENDS), "the document ends do not rise")
        self.labels: np.ndarray | None = None
        if info.runs is not msgspec.UNSET:
            self.labels = self._read_rising(LABELS, info.runs, "run")
        self._bytes: np.ndarray | None = None
        if self.mapped:
            self._bytes = mapped_bytes(store, self.tokens_name)
            self.tokens: np.ndarray = self._bytes[self._header :].view(self.dtype)
        if verify == "full":
            self.check(0, info.tokens)

    @property
    def record(self) -> ShardRecord:
        """The commit record, read and checked against the manifest on first use."""
        if self._record is None:
            self._record = ShardRecord.decode(
                self._read_whole(RECORD),
                self.store.url(self.name + RECORD),
                sha256=self._sha256.record,
                token_bytes=self._size,
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
        end = min(last * size, self._size)
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
        result: np.ndarray = left[first] == left[last]
        return result

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

    def _read_rising(self, kind: str, count: int, one: str) -> np.ndarray:
        """Return uint64 [count] that rise to the token count, from a file that is as it was."""
        header = npy_header(np.dtype(np.uint64), count)
        self._check_file(self.name + kind, header, count, 8)
        url = self.store.url(self.name + kind)
        if not self.mapped:
            data = np.frombuffer(self._read_whole(kind, len(header) + 8 * count), np.uint8)
        else:  # mapped, so that thousands of open shards keep none of it in memory
            data = mapped_bytes(self.store, self.name + kind)
        sha256 = self._sha256[kind.split(".")[1]]
        if self.verify != "off" and hashlib.sha256(data.data).hexdigest() != sha256:
            raise damaged(url, f"the {one} ends do not match their digest in the manifest")
        values = data[HEADER_BYTES:].view(np.uint64)
        if np.any(values[1:] <= values[:-1]):
            raise damaged(url, f"the {one} ends do not rise")
        if (int(values[-1]) if len(values) else 0) != self._tokens:
            raise damaged(url, f"the last {one} does not end at token {self._tokens:,}")
        return values

    def _read_whole(self, kind: str, limit: int = MAX_DOCUMENT) -> bytes:
        try:
            return self.store.read(self.name + kind, limit=limit)
        except FileNotFoundError as error:
            raise damaged(self.store.url(self.name + kind), "the file is missing") from error
