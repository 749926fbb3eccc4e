"""`--to megatron`: an indexed dataset of Megatron-LM a shard, one sequence a document.

With `--merge` one for the whole dataset: `dataset.bin` and `dataset.idx`, which are one prefix.

    shard-00000.bin    ids and nothing else; 32-bit ids as int32, the same bits below 2^31
    shard-00000.idx    "MMIDIDX" and two zero bytes, u64 version 1, u8 dtype code, u64 sequences,
                       u64 documents + 1, i32 length of each sequence, i64 byte offset of each, i64
                       first sequence of each document and one past the last

Layout from megatron/core/datasets/indexed_dataset.py. Never: a document cut into two sequences.
"""

from __future__ import annotations

import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.errors import InputError
from olm_data.exporting.base import (
    PIECE,
    ByShard,
    Counts,
    lost_columns,
    place_tokens,
    token_pieces,
)

MAGIC, VERSION = b"MMIDIDX\0\0", 1
CODES = {"uint16": 8, "uint32": 4}  # 4 is int32: Megatron knows no uint32
MOST = 2**31 - 1
MERGED = "dataset"
"""Prefix of the files of a merged export."""


class Megatron(ByShard):
    """Writes `.bin` and `.idx` of each shard. See `base.Writer`."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.dataset, self.folder, self.counts = dataset, folder, Counts()

    def add(self, index: int, shard: Shard) -> None:
        """Write the two files of a shard.

        Raises:
            InputError: a document, or an id, is too large for Megatron's 31 bits.
        """
        self._refuse_large_ids(index, shard)
        prefix = self.folder / self.dataset.manifest.shards[index].name
        tokens, linked = place_tokens(self.dataset, shard, Path(f"{prefix}.bin"))
        with open(f"{prefix}.idx", "wb") as file:
            Index(file, self.dataset.dtype, len(shard.ends)).add(shard)
        self.counts.tokens += tokens
        self.counts.linked += linked
        self.counts.documents += len(shard.ends)

    def _refuse_large_ids(self, index: int, shard: Shard) -> None:
        info = self.dataset.manifest.shards[index]
        if info.max_token_id > MOST:
            raise _too_large(f"token id {info.max_token_id:,}", shard.store.url(info.name))

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held, and how Megatron tells documents apart in a sample."""
        said = lost_columns(dataset, ids=True, origins=True)
        rules = dataset.manifest.tokenizer
        if rules.eos is None or rules.special == "allow":
            why = "documents have no EOS" if rules.eos is None else "text may hold EOS ids"
            said.append(
                f"{why}, and inside a sample Megatron finds borders by that id alone "
                "(--reset-attention-mask, --reset-position-ids, --eod-mask-loss)"
            )
        return said


class MegatronMerged(Megatron):
    """Writes one `.bin` and one `.idx` for all shards, a shard at a time. See `base.Writer`."""

    whole = True

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        super().__init__(dataset, folder)
        with ExitStack() as opened:
            self._tokens = opened.enter_context(open(folder / f"{MERGED}.bin", "wb"))
            file = opened.enter_context(open(folder / f"{MERGED}.idx", "wb"))
            self._index = Index(file, dataset.dtype, dataset.documents)
            self._opened = opened.pop_all()

    def add(self, index: int, shard: Shard) -> None:
        """Write the tokens and index entries of a shard.

        Raises:
            InputError: a document, or an id, is too large for Megatron's 31 bits.
        """
        self._refuse_large_ids(index, shard)
        for piece in token_pieces(shard):
            self._tokens.write(piece.data)
            self.counts.tokens += len(piece)
        self._index.add(shard)
        self.counts.documents += len(shard.ends)

    def finish(self) -> None:
        """Close the two files."""
        self._opened.close()

    @staticmethod
    def links(dataset: Dataset) -> bool:
        """Whether the tokens need no copy: never, as one file holds those of all shards."""
        return False


class Index:
    """An `.idx` that is written shard by shard: its three tables grow side by side.

    Args:
        file: open for writing, empty.
        dtype: of the tokens.
        documents: how many will be added in all.
    """

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any], documents: int) -> None:
        self._file, self._item = file, dtype.itemsize
        self._documents = self._tokens = 0
        head = MAGIC + struct.pack("<QBQQ", VERSION, CODES[dtype.name], documents, documents + 1)
        file.write(head)
        self._lengths = len(head)
        self._offsets = self._lengths + 4 * documents
        self._firsts = self._offsets + 8 * documents
        self._write(self._firsts, np.zeros(1, "<i8"))

    def add(self, shard: Shard) -> None:
        """Add the documents of a shard.

        Raises:
            InputError: a document is too large for Megatron's 31 bits.
        """
        ends, count = shard.ends, len(shard.ends)
        for low in range(0, count, PIECE):
            bounds = _starts(ends, low, min(low + PIECE, count) + 1)
            lengths, done = np.diff(bounds), self._documents + low
            if lengths.max() > MOST:
                where = shard.store.url(shard.name)
                raise _too_large(f"a document of {lengths.max():,} tokens", where)
            self._write(self._lengths + 4 * done, lengths.astype("<i4"))
            offsets = (bounds[:-1] + self._tokens) * self._item
            self._write(self._offsets + 8 * done, offsets.astype("<i8"))
            numbers = np.arange(done + 1, done + 1 + len(lengths), dtype="<i8")
            self._write(self._firsts + 8 * (done + 1), numbers)
        self._documents += count
        self._tokens += int(ends[-1]) if count else 0

    def _write(self, place: int, values: np.ndarray) -> None:
        self._file.seek(place)
        self._file.write(values.data)


def _starts(ends: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return where documents [low, high) start, int64; document len(ends) starts at the end."""
    before = ends[max(low - 1, 0) : high - 1].astype(np.int64)
    return np.append(np.int64(0), before) if low == 0 else before


def _too_large(what: str, where: str) -> InputError:
    return InputError(
        f"{what} is too large for Megatron's index",
        where=where,
        why="it counts in signed 32-bit numbers",
        fix="export to another format",
    )
