"""Packing `concat`: the documents of a source are one stream, and rows are windows of it.

    row r of a source -> tokens [r*S, r*S + S]: S inputs and the one that follows, the last label

Neighbouring rows share one token, which is the last label of the first and the first input of the
second, so every token but the stream's first is a label exactly once. Of a whole dataset that is
arithmetic, no index; of a view it is a row plan. Pure.

Also: packing of order `olmo-core`: rows as OLMo-core's `NumpyFSLDataset` cuts token files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.packing import base
from olm_data.packing.base import Documents, Int64, PackedRows, Packing, PackingCost, ranges

Rows = TypeVar("Rows", int, np.ndarray)


def rows_in(tokens: int, sequence_length: int) -> int:
    """Return how many whole rows a stream of `tokens` tokens has."""
    return max(0, (tokens - 1) // sequence_length)


def row_span(row: Rows, sequence_length: int) -> tuple[Rows, Rows]:
    """Return the token positions [start, stop) of a row, or of each of an array of rows.

    stop - start is sequence_length + 1.
    """
    start = row * sequence_length
    return start, start + sequence_length + 1


def unused_tail(tokens: int, sequence_length: int) -> int:
    """Return how many tokens at the stream's end stand in no row."""
    rows = rows_in(tokens, sequence_length)
    return tokens - (rows * sequence_length + 1) if rows else tokens


@dataclass(frozen=True)
class StreamRows:
    """The rows of a stream without a plan, asked as a `RowPlan` is; `rows` of `sequence_length`."""

    rows: int
    sequence_length: int

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return (first token, tokens) of a row: one piece, whatever documents it holds."""
        return [(row * self.sequence_length, self.sequence_length + 1)]

    def rows_with(self, start: int, stop: int) -> Int64:
        """Return the rows, ascending int64, that may have an input of the tokens [start, stop)."""
        last = min((stop - 1) // self.sequence_length + 1, self.rows)
        return np.arange(start // self.sequence_length, last, dtype=np.int64)


class Concat(Packing, frozen=True):
    """All documents as one stream, cut into rows."""

    name: ClassVar[str] = "concat"
    planned: ClassVar[bool] = False

    def pack(
        self, dataset: Dataset, documents: Documents, sequence_length: int, cost: PackingCost
    ) -> Iterator[PackedRows]:
        """Yield the rows that the stream has with each window and had not before."""
        size, rows_before = sequence_length, cost.rows
        starts = lengths = np.zeros(0, np.int64)
        begun = False  # whether the first document at hand is the rest of one in earlier rows
        for more_starts, more_lengths in documents:
            starts = np.concatenate([starts, more_starts[more_lengths > 0]])
            lengths = np.concatenate([lengths, more_lengths[more_lengths > 0]])
            ends = np.cumsum(lengths)
            rows = rows_in(int(lengths.sum()), size)
            if not rows:
                continue
            for row in range(0, rows, base.PART):
                yield _rows(starts, lengths, ends, row, min(row + base.PART, rows), size)
            used = rows * size
            cost.rows += rows
            cost.tokens += used
            first = ends - lengths
            apart = (first < used) & (first // size != (ends - 1) // size)
            apart[0] &= not begun
            cost.cut_long += int((apart & (lengths > size)).sum())
            cost.cut_short += int((apart & (lengths <= size)).sum())
            # from here on: token `used`, the last label so far, is the first input that follows
            at = int(np.searchsorted(ends, used, side="right"))
            gone = used - int(first[at])
            begun = gone > 0
            starts, lengths = starts[at:].copy(), lengths[at:].copy()
            starts[0] += gone
            lengths[0] -= gone
        cost.dropped += int(lengths.sum()) - (cost.rows > rows_before)

    def none_because(self, sequence_length: int) -> str:
        """Return how long a row is."""
        return (
            f"one row takes {sequence_length + 1:,} (sequence_length {sequence_length:,} and the "
            "token that follows)"
        )


def _rows(starts: Int64, lengths: Int64, ends: Int64, i: int, j: int, size: int) -> PackedRows:
    """Return rows i .. j-1 of some documents; neighbours share the token on their border."""
    low = np.arange(i, j, dtype=np.int64) * size
    first = np.searchsorted(ends, low, side="right")
    last = np.searchsorted(ends, low + size, side="right")
    counts = last - first + 1
    document = ranges(first, counts)
    before = (ends - lengths)[document]
    begin = np.maximum(np.repeat(low, counts), before)
    stop = np.minimum(np.repeat(low + size + 1, counts), ends[document])
    return PackedRows(starts[document] + begin - before, stop - begin, counts)


class Instances(Concat, frozen=True):
    """The documents of each shard as one stream, cut into whole chunks of rows.

    Attributes:
        chunk_rows: rows of a chunk.
    """

    planned: ClassVar[bool] = True

    chunk_rows: int

    def pack(
        self, dataset: Dataset, documents: Documents, sequence_length: int, cost: PackingCost
    ) -> Iterator[PackedRows]:
        """Yield the rows of each shard: pieces of all its documents, S tokens a row."""
        for number, info in enumerate(dataset.manifest.shards):
            rows = info.tokens // (sequence_length * self.chunk_rows) * self.chunk_rows
            used, before = rows * sequence_length, int(dataset.token_ends[number]) - info.tokens
            ends = dataset.open_shard(number).ends.astype(np.int64)  # not kept open: may be many
            lengths = np.diff(ends, prepend=np.int64(0))
            apart = (ends <= used) & (
                (ends - lengths) // sequence_length != (ends - 1) // sequence_length
            )
            cost.rows += rows
            cost.tokens += used
            cost.cut_long += int((apart & (lengths > sequence_length)).sum())
            cost.cut_short += int((apart & (lengths <= sequence_length)).sum())
            cost.dropped += info.tokens - used
            stops = np.union1d(ends[ends < used], np.arange(1, rows + 1) * sequence_length)
            starts = np.concatenate([np.zeros(1, np.int64), stops])[: len(stops)]
            counts = np.bincount(starts // sequence_length, minlength=rows).astype(np.int64)
            yield PackedRows(before + starts, stops - starts, counts)
