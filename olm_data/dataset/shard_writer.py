"""Writing one shard: staged, made durable, then seen as a whole.

    ids, offsets, document rows  ->  ShardWriter.append ... .commit  ->  publish_shard
    staged files, ends, labels   ->  publish_shard: its files, the record last

A token file that is in its place already (`importing/`) needs `publish_shard` only. The format is
specified in docs/reference/format.md.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from olm_data.bounded_json import sha256_file
from olm_data.dataset.account import InputAccount
from olm_data.dataset.docs import DOCS, ROW_GROUP, DocsWriter, docs_schema
from olm_data.dataset.inputs import Container
from olm_data.dataset.labels import changes, trained_at, trained_tokens
from olm_data.dataset.record import (
    BLOCK_BYTES,
    RECORD,
    Blocks,
    FileInfo,
    ImportedFile,
    ShardRecord,
    encode_units,
    file_header,
    npy_header,
    stored_plan,
    tokens_header,
    tokens_suffix,
    window_counts,
)
from olm_data.dataset.shard import ENDS, LABELS
from olm_data.errors import ConflictError, ValidationError
from olm_data.order.prp import permute, round_keys
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store, create_json, write_json

if TYPE_CHECKING:
    import pyarrow as pa

CAST_TOKENS = 1 << 20  # narrowed and written at a time


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
        labels: whether it is said of each token if it is trained.
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
        labels: bool = False,
        container: Container = "npy",
    ) -> None:
        self.store, self.name, self.vocab_size = store, name, vocab_size
        self.dtype = np.dtype(dtype)
        self._container, self._tokens_kind = container, tokens_suffix(container)
        kinds = (self._tokens_kind, ENDS, DOCS, *([LABELS] if labels else []))
        self._changes: list[np.ndarray] | None = [] if labels else None
        self._trained = False  # the last token so far
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

    def append(
        self,
        ids: np.ndarray,
        offsets: np.ndarray,
        docs: pa.RecordBatch,
        trained: np.ndarray | None = None,
    ) -> None:
        """Append documents in order.

        Args:
            ids: uint32 [n], the documents' tokens end to end, BOS and EOS included.
            offsets: int64 [d + 1] into `ids`; every document has at least one token.
            docs: d rows with the columns of `docs_schema`.
            trained: bool [n], where the shard has labels; else None.

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
        assert (trained is None) == (self._changes is None)
        if trained is not None and self._changes is not None:
            part = trained[offsets[0] : offsets[-1]]
            self._changes.append(changes(part, self._trained) + self._tokens)
            self._trained = bool(part[-1])
        self._ends.append((offsets[1:] - offsets[0] + self._tokens).astype(np.uint64))
        self._tokens += len(body)
        self._documents += documents
        self._text_bytes += int(as_numpy(docs.column("text_bytes")).sum())
        self._max_token_id = max(self._max_token_id, largest)

    def commit(
        self, *, plan: str, units: Sequence[InputAccount | ImportedFile], dropped: dict[str, int]
    ) -> ShardRecord:
        """Make the shard durable and visible: tokens, ends, docs, then the record.

        An empty shard has a record but no other file. A late worker of the same plan writes the
        same bytes again; over the shard of another plan nothing is written.

        Raises:
            ConflictError: the folder holds this shard of another plan.
        """
        refuse_other_plan(self.store, self.name, plan)
        ends = np.concatenate(self._ends) if self._ends else np.zeros(0, np.uint64)
        tokens, labels = self._paths[self._tokens_kind], None
        if self._changes is not None:
            labels = np.concatenate([*self._changes, [self._tokens]]).astype(np.uint64)
        with io_errors(self.store.url(self.name)):
            self._docs.finish()
            self._file.seek(0)
            _write_all(self._file, file_header(self._container, self.dtype, self._tokens))
            os.fsync(self._file.fileno())
            self._file.close()
            if self._shuffle is not None and len(ends):
                order = document_order(self._shuffle, self.name, len(ends))
                labels = None if labels is None else shuffle_labels(labels, ends, order)
                ends = shuffle_tokens(
                    tokens, tokens_header(self._container), self.dtype, ends, order
                )
                shuffle_rows(self._paths[DOCS], order)
            summary = _summary(tokens, self._max_token_id)
        return publish_shard(
            self.store,
            self.name,
            self._paths,
            ends,
            summary,
            labels=labels,
            plan=plan,
            text_bytes=self._text_bytes,
            units=units,
            dropped=dropped,
        )

    def discard(self) -> None:
        """Close the unfinished files; the staging folder's owner removes them."""
        self._file.close()
        self._docs.discard()


@dataclass(frozen=True, kw_only=True)
class TokensSummary:
    """What a commit record says of a token file.

    Attributes:
        file: its size and sha256.
        crc32: of each block of `BLOCK_BYTES`, 8 hexadecimal digits each.
        largest: the largest id; -1 where there is none.
    """

    file: FileInfo
    crc32: str
    largest: int


def publish_shard(
    store: Store,
    name: str,
    paths: Mapping[str, Path],
    ends: np.ndarray,
    tokens: TokensSummary,
    *,
    labels: np.ndarray | None = None,
    plan: str,
    text_bytes: int,
    units: Sequence[InputAccount | ImportedFile],
    dropped: dict[str, int],
) -> ShardRecord:
    """Write the ends, publish the staged files and then the commit record; an empty shard has no
    other file.

    Args:
        paths: suffix -> staged file, with those of `ENDS` (written here) and `DOCS`; the token file
            too, unless it is in its place already; `LABELS` where there are labels.
        ends: uint64 [documents], where the documents end.
        labels: uint64 [runs], see `labels.py`; None where all is trained.

    Raises:
        ConflictError: the folder holds this shard of another plan.
    """
    with io_errors(store.url(name)):
        arrays = {ENDS: ends} if labels is None else {ENDS: ends, LABELS: labels}
        for kind, array in arrays.items():
            with open(paths[kind], "wb", buffering=0) as file:
                _write_all(file, npy_header(np.dtype(np.uint64), len(array)))
                _write_all(file, array.view(np.uint8).data)
                os.fsync(file.fileno())
        with open(paths[DOCS], "rb") as file:
            os.fsync(file.fileno())
        files = {"tokens": tokens.file}
        for kind in (*arrays, DOCS):
            files[kind.split(".")[1]] = FileInfo(
                paths[kind].stat().st_size, sha256_file(paths[kind])
            )
    count = int(ends[-1]) if len(ends) else 0
    runs: int | msgspec.UnsetType = msgspec.UNSET
    trained: int | msgspec.UnsetType = msgspec.UNSET
    if labels is not None and count:
        runs, trained = len(labels), trained_tokens(labels)
    record = ShardRecord(
        version=1 if runs is msgspec.UNSET else 2,
        name=name,
        plan=plan,
        tokens=count,
        documents=len(ends),
        text_bytes=text_bytes,
        max_token_id=tokens.largest,
        files=files if count else {},
        blocks=Blocks(BLOCK_BYTES, tokens.crc32 if count else ""),
        units=encode_units(units),
        dropped=dict(sorted(dropped.items())),
        windows=window_counts(ends),
        runs=runs,
        trained=trained,
    )
    if count:
        for kind, path in paths.items():
            store.publish(name + kind, path, files[kind.split(".")[1]].sha256)
    try:
        create_json(store, name + RECORD, record.encode())
    except ConflictError:
        refuse_other_plan(store, name, plan)
        write_json(store, name + RECORD, record.encode())  # damaged, or of a lost shard
    return record


def refuse_other_plan(store: Store, name: str, plan: str) -> None:
    """Refuse to write over a shard that another plan committed.

    Raises:
        ConflictError: it did.
    """
    if stored_plan(store, name) not in (None, plan):
        raise ConflictError(
            "the output holds this shard of another plan",
            where=store.url(name + RECORD),
            why="another run, with other inputs or options, writes there",
            fix="stop that run, or choose another --output",
        )


def _write_all(file: Any, data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file: the kernel may accept less at a time."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def _summary(path: Path, largest: int) -> TokensSummary:
    """Read a token file once for its digest and its checksums."""
    sha256, crc32 = hashlib.sha256(), []
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            sha256.update(block)
            crc32.append(f"{zlib.crc32(block):08x}")
        info = FileInfo(file.tell(), sha256.hexdigest())
    return TokensSummary(file=info, crc32="".join(crc32), largest=largest)


PIECE = 1 << 20
"""Tokens moved at a time: 8 bytes of index and at most 4 of id each."""


def document_order(seed: int, name: str, documents: int) -> np.ndarray:
    """Return int64 [documents]: at place i stands the document that was appended as `order[i]`."""
    keys = round_keys(seed, f"documents:{name}", 0)
    return permute(np.arange(documents, dtype=np.int64), documents, keys)


def shuffle_tokens(
    path: Path, header: int, dtype: np.dtype[Any], ends: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Put the tokens of a staged file into a new order of documents.

    Args:
        path: header of `header` bytes, then the tokens; replaced by such a file.
        ends: uint64 [documents], document ends in tokens.
        order: int64 [documents].

    Returns:
        uint64 [documents], the new ends.
    """
    tokens = np.memmap(path, dtype, "r", header)
    fresh = path.with_suffix(".shuffled")
    with open(path, "rb") as old, open(fresh, "wb") as file:
        file.write(old.read(header))
        for source in _moved(ends, order):
            file.write(tokens[source].data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    return np.cumsum(np.diff(ends, prepend=np.uint64(0))[order], dtype=np.uint64)


def shuffle_labels(labels: np.ndarray, ends: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the labels, uint64 [runs], of the tokens in a new order of documents.

    Args:
        ends: uint64 [documents], document ends in tokens before.
        order: int64 [documents].
    """
    parts, done, before = [], 0, False
    for source in _moved(ends, order):
        mask = trained_at(labels, source)
        parts.append(changes(mask, before) + done)
        done, before = done + len(mask), bool(mask[-1])
    return np.concatenate([*parts, [done]]).astype(np.uint64)


def _moved(ends: np.ndarray, order: np.ndarray) -> Iterator[np.ndarray]:
    """Yield int64 [n], for `PIECE` tokens at a time of the new order, where they stood before."""
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    lengths = np.diff(ends.astype(np.int64), prepend=0)[order]
    new_ends = np.cumsum(lengths)
    moved = starts[order] - (new_ends - lengths)  # how far back each document's tokens come from
    for low in range(0, int(ends[-1]), PIECE):
        high = min(low + PIECE, int(ends[-1]))
        first = int(np.searchsorted(new_ends, low, side="right"))
        last = int(np.searchsorted(new_ends, high, side="left")) + 1
        here = np.minimum(new_ends[first:last], high)
        counts = np.diff(here, prepend=low)
        yield np.repeat(moved[first:last], counts) + np.arange(low, high)


def shuffle_rows(path: Path, order: np.ndarray) -> None:
    """Put the rows of a staged `docs.parquet` into a new order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from olm_data.arrow_values import numbers

    table = pq.read_table(path, use_threads=False).combine_chunks()
    fresh = path.with_suffix(".shuffled")
    with DocsWriter(fresh, table.schema) as writer:
        for low in range(0, len(order), ROW_GROUP):
            part = table.take(numbers(order[low : low + ROW_GROUP], pa.int64()))
            for rows in part.to_batches():
                writer.append(rows)
    os.replace(fresh, path)
