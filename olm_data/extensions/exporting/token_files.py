"""Exports to OLMo-core, datatrove and Megatron: files of ids, and beside each what describes it.

    shard --link, or copy in pieces--> file of ids without header
          --ends, document rows-----> .csv.gz | .ds.index, .ds.metadata | .idx

The tokens are a hard link where the dataset holds just such a file. With `--merge` Megatron has one
pair of files for the whole dataset.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.errors import InputError, printable
from olm_data.extensions.exporting.base import (
    PIECE,
    Writer,
    document_batches,
    lost_columns,
    too_large,
)

MAGIC, VERSION = b"MMIDIDX\0\0", 1
CODES = {"uint16": 8, "uint32": 4}  # 4 is int32: Megatron knows no uint32
MOST = 2**31 - 1
MERGED = "dataset"
"""Prefix of the files of a merged export."""


def is_linkable(dataset: Dataset) -> bool:
    """Whether the dataset's token files are headerless local files."""
    return dataset.manifest.container == "raw" and not dataset.store.remote


class ByShard(Writer):
    """Writes for each shard a file of its tokens, which may be a link, and what describes it."""

    suffix: ClassVar[str]

    def add(self, index: int, shard: Shard) -> None:
        """Write the files of a shard."""
        path = self.folder / f"{shard.name}{self.suffix}"
        tokens, linked = place_tokens(self.dataset, shard, path)
        self.counts.documents += self.describe(shard, path, tokens)
        self.counts.tokens += tokens
        self.counts.linked += linked

    def describe(self, shard: Shard, path: Path, tokens: int) -> int:
        """Write what says where documents end in the token file `path`; return how many do."""
        raise NotImplementedError

    def finish(self) -> None:
        """Nothing spans the shards: readers are given their names, or the folder."""

    @staticmethod
    def links(dataset: Dataset) -> bool:
        """Whether the tokens need no copy."""
        return is_linkable(dataset)


def place_tokens(dataset: Dataset, shard: Shard, path: Path) -> tuple[int, bool]:
    """Bring the tokens of a shard, checked, into the headerless file `path`.

    Returns:
        (tokens in the file, whether it is a link and no copy).

    Raises:
        ValidationError: a block of the tokens differs from its checksum.
    """
    linked = is_linkable(dataset) and _link(shard, path)
    if not linked:
        with open(path, "wb") as file:
            for piece in token_pieces(shard):
                file.write(piece.data)
    return path.stat().st_size // dataset.dtype.itemsize, linked


def _link(shard: Shard, path: Path) -> bool:
    shard.check(0, len(shard.tokens))
    try:
        os.link(os.path.realpath(shard.store.url(shard.tokens_name)), path)
    except OSError:  # another filesystem, or one without links: the copy says what else is wrong
        return False
    return True


def token_pieces(shard: Shard) -> Iterator[np.ndarray]:
    """Yield the tokens of a shard in order, at most `PIECE` at a time."""
    tokens = int(shard.ends[-1]) if len(shard.ends) else 0
    for start in range(0, tokens, PIECE):
        yield shard.read(start, min(start + PIECE, tokens))


class OlmoCoreFiles(ByShard):
    """Writes `.npy` and `.csv.gz` beside it.

        shard-00000.npy     ids and nothing else, little-endian; not a NumPy file for all its name
        shard-00000.csv.gz  a line a document: start, end (tokens, end exclusive), id, src, loc

    `loc` is the input's line or row, from 1; for inputs read by byte ranges, the offset of the
    line. No field holds a line break, as OLMo-core splits this file by lines and not as CSV.
    """

    suffix = ".npy"

    def describe(self, shard: Shard, path: Path, tokens: int) -> int:
        """Write where each document is, and where it came from."""
        with (
            open(path.with_suffix(".csv.gz"), "wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
            io.TextIOWrapper(packed, "utf-8", newline="") as text,
        ):
            return self._write_documents(shard, csv.writer(text, lineterminator="\n").writerow)

    def _write_documents(self, shard: Shard, write_row: Callable[[list[Any]], Any]) -> int:
        count = 0
        inputs = self.dataset.manifest.inputs
        for first, ends, rows in document_batches(shard, ["id", "input", "position"], PIECE):
            starts = np.append(np.uint64(first), ends[:-1])
            ids, places, positions = (rows.column(k).to_pylist() for k in range(3))
            for start, end, id, place, position in zip(
                starts.tolist(), ends.tolist(), ids, places, positions, strict=True
            ):
                source = inputs[place]
                loc = position if source.position == "byte" else position + 1
                names = self._one_line(id), self._one_line(source.path)
                write_row([start, end, *names, loc])
            count += len(ends)
        return count

    def _one_line(self, name: str | None) -> str:
        if name is None:
            self.counts.without_id += 1
            return ""
        if "\n" in name or "\r" in name:
            self.counts.broken_names += 1
            return name.replace("\n", "\\n").replace("\r", "\\r")
        return name

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held, and where OLMo-core looks for borders."""
        said = lost_columns(dataset, ids=False, origins=False)
        if any(source.position == "byte" for source in dataset.manifest.inputs):
            said.append("loc is a byte offset, not a line, for inputs read by byte ranges")
        rules = dataset.manifest.tokenizer
        if rules.eos is None or rules.special == "allow":
            why = "documents have no EOS" if rules.eos is None else "text may hold EOS ids"
            said.append(
                f"{why}, and OLMo-core looks for EOS ids in local files unless "
                "use_array_if_local=False: with its default it sees other documents"
            )
        said.append("OLMo-core's NumpyFSLDataset leaves out the last partial row of each file")
        return said


class Datatrove(ByShard):
    """Writes `.ds`, `.ds.index` and `.ds.metadata`.

        shard-00000.ds             ids and nothing else, uint16 or uint32
        shard-00000.ds.index       uint64 ends of the documents, cumulative, in tokens
        shard-00000.ds.metadata    three lines: tokenizer|bytes a token, tokens, tokens for people

    Layout from datatrove/pipeline/tokens/tokenizer.py (TokenizedFile).
    """

    suffix = ".ds"

    def describe(self, shard: Shard, path: Path, tokens: int) -> int:
        """Write the index and the metadata."""
        with open(f"{path}.index", "wb") as file:
            for low in range(0, len(shard.ends), PIECE):
                file.write(shard.ends[low : low + PIECE].astype("<u8").data)
        name = printable(self.dataset.tokenizer_name).replace("|", "_")
        size = self.dataset.dtype.itemsize
        Path(f"{path}.metadata").write_text(f"{name}|{size}\n{tokens}\n{for_people(tokens)}")
        return len(shard.ends)

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held, and what datatrove's reader leaves out."""
        said = lost_columns(dataset, ids=True, origins=True)
        said.append("datatrove's dataset leaves out the last partial window of each file")
        return said


def for_people(tokens: int) -> str:
    """Return a token count with three digits and a metric prefix: `1.23 MT`."""
    exponent = len(str(tokens)) - 1
    number = tokens / 10 ** (exponent // 3 * 3)
    return f"{number:.{2 - exponent % 3}f} {['', 'k', 'M', 'G', 'T', 'P'][exponent // 3]}T"


class Megatron(ByShard):
    """Writes `.bin` and `.idx` of each shard.

    With `--merge` one for the whole dataset: `dataset.bin` and `dataset.idx`, which are one prefix.

        shard-00000.bin  ids and nothing else; 32-bit ids as int32, the same bits below 2^31
        shard-00000.idx  "MMIDIDX" and two zero bytes, u64 version 1, u8 dtype code, u64 sequences,
                         u64 documents + 1, i32 length of each sequence, i64 byte offset of each,
                         i64 first sequence of each document and one past the last

    Layout from megatron/core/datasets/indexed_dataset.py.
    """

    suffix = ".bin"

    def add(self, index: int, shard: Shard) -> None:
        """Write the two files of a shard.

        Raises:
            InputError: a document, or an id, is too large for Megatron's 31 bits.
        """
        self._refuse_large_ids(index, shard)
        super().add(index, shard)

    def describe(self, shard: Shard, path: Path, tokens: int) -> int:
        """Write the index."""
        with open(path.with_suffix(".idx"), "wb") as file:
            MegatronIndex(file, self.dataset.dtype, len(shard.ends)).add(shard)
        return len(shard.ends)

    def _refuse_large_ids(self, index: int, shard: Shard) -> None:
        info = self.dataset.manifest.shards[index]
        if info.max_token_id > MOST:
            raise _too_large(f"token id {info.max_token_id:,}", shard)

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
    """Writes one `.bin` and one `.idx` for all shards, a shard at a time."""

    whole = True

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        super().__init__(dataset, folder)
        with ExitStack() as opened:
            self._tokens = opened.enter_context(open(folder / f"{MERGED}.bin", "wb"))
            file = opened.enter_context(open(folder / f"{MERGED}.idx", "wb"))
            self._index = MegatronIndex(file, dataset.dtype, dataset.documents)
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


class MegatronIndex:
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
                raise _too_large(f"a document of {lengths.max():,} tokens", shard)
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


def _too_large(what: str, shard: Shard) -> InputError:
    why = "it counts in signed 32-bit numbers"
    return too_large(f"{what} is too large for Megatron's index", shard, why)
