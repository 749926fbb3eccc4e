"""`--to megatron`: an indexed dataset of Megatron-LM a shard, one sequence a document.

    shard-00000.bin    ids and nothing else; 32-bit ids as int32, the same bits below 2^31
    shard-00000.idx    "MMIDIDX" and two zero bytes, u64 version 1, u8 dtype code, u64 sequences,
                       u64 documents + 1, i32 length of each sequence, i64 byte offset of each, i64
                       first sequence of each document and one past the last

Layout from megatron/core/datasets/indexed_dataset.py. Never: a document cut into two sequences.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.errors import InputError
from olm_data.exporting.base import PIECE, ByShard, Counts, lost_columns, place_tokens

MAGIC, VERSION = b"MMIDIDX\0\0", 1
CODES = {"uint16": 8, "uint32": 4}  # 4 is int32: Megatron knows no uint32
MOST = 2**31 - 1


class Megatron(ByShard):
    """Writes `.bin` and `.idx`. See `base.Writer`."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.dataset, self.folder, self.counts = dataset, folder, Counts()

    def add(self, index: int, shard: Shard) -> None:
        """Write the two files of a shard.

        Raises:
            InputError: a document, or an id, is too large for Megatron's 31 bits.
        """
        info = self.dataset.manifest.shards[index]
        if info.max_token_id > MOST:
            raise _too_large(f"token id {info.max_token_id:,}", shard.store.url(info.name))
        tokens, linked = place_tokens(self.dataset, shard, self.folder / f"{info.name}.bin")
        self.counts.tokens += tokens
        self.counts.linked += linked
        self.counts.documents += self._write_index(shard, self.folder / f"{info.name}.idx")

    def _write_index(self, shard: Shard, path: Path) -> int:
        ends, item = shard.ends, self.dataset.dtype.itemsize
        count, parts = len(ends), range(0, len(ends), PIECE)
        with open(path, "wb") as file:
            code = CODES[self.dataset.dtype.name]
            file.write(MAGIC + struct.pack("<QBQQ", VERSION, code, count, count + 1))
            for low in parts:
                lengths = np.diff(_starts(ends, low, low + PIECE + 1))
                if lengths.max() > MOST:
                    where = shard.store.url(shard.name)
                    raise _too_large(f"a document of {lengths.max():,} tokens", where)
                file.write(lengths.astype("<i4").data)
            for low in parts:
                starts = _starts(ends, low, min(low + PIECE, count))
                file.write((starts * item).astype("<i8").data)
            for low in range(0, count + 1, PIECE):
                file.write(np.arange(low, min(low + PIECE, count + 1), dtype="<i8").data)
        return count

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
