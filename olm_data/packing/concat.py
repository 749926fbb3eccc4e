"""Packing `concat`: the documents of a source are one stream, and rows are windows of it.

    row r of a source -> tokens [r*S, r*S + S]: S inputs and the one that follows, the last label

Neighbouring rows share one token, which is the last label of the first and the first input of the
second, so every token but the stream's first is a label exactly once. Of a whole dataset that is
arithmetic, no index; of a view it is a row plan. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.packing import base
from olm_data.packing.base import Int64, PackedRows, Packing, PackingCost

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
        """Return (first token, tokens) of a row: one piece, of all documents that it meets."""
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
        self,
        dataset: Dataset,
        documents: Iterable[tuple[Int64, Int64]],
        sequence_length: int,
        cost: PackingCost,
    ) -> Iterator[PackedRows]:
        """Yield the rows of the stream of the documents."""
        packer = StreamPacker(sequence_length, cost)
        for starts, lengths in documents:
            yield from packer.pack(starts, lengths)

    def none_because(self, sequence_length: int) -> str:
        """Return how long a row is."""
        return (
            f"one row takes {sequence_length + 1:,} (sequence_length {sequence_length:,} and the "
            "token that follows)"
        )


class StreamPacker:
    """Packs chosen documents as one stream, row r from its token r * S, across windows.

    What is left at the end and fills no row is dropped.
    """

    def __init__(self, sequence_length: int, cost: PackingCost) -> None:
        self._length, self._cost, self._past = sequence_length, cost, 0
        self._starts: Int64 = np.zeros(0, np.int64)
        self._lengths: Int64 = np.zeros(0, np.int64)

    def pack(self, starts: Int64, lengths: Int64) -> Iterator[PackedRows]:
        """Yield the rows that the stream has now and had not before."""
        starts = np.concatenate([self._starts, starts[lengths > 0]])
        lengths = np.concatenate([self._lengths, lengths[lengths > 0]])
        size, ends = self._length, np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        rows = max(0, (total - 1) // size)
        for row in range(0, rows, base.PART):
            yield self._rows(starts, lengths, ends, row, min(row + base.PART, rows))
        self._count_cuts(lengths, ends, rows * size)
        self._keep(starts, lengths, ends, rows * size)
        self._cost.rows += rows
        self._cost.tokens += rows * size
        self._cost.dropped = total - (rows * size + 1 if rows else 0)

    def _rows(self, starts: Int64, lengths: Int64, ends: Int64, i: int, j: int) -> PackedRows:
        """Return rows i .. j-1 of what is at hand; neighbours share the token on their border."""
        size = self._length
        low = np.arange(i, j, dtype=np.int64) * size
        first = np.searchsorted(ends, low, side="right")
        last = np.searchsorted(ends, low + size, side="right")
        counts = last - first + 1
        document = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        before = (ends - lengths)[document]
        begin = np.maximum(np.repeat(low, counts), before)
        stop = np.minimum(np.repeat(low + size + 1, counts), ends[document])
        return PackedRows(starts[document] + begin - before, stop - begin, counts)

    def _count_cuts(self, lengths: Int64, ends: Int64, used: int) -> None:
        """Count the documents that begin in these rows and go on in another row than they begin."""
        begin = ends - lengths
        fresh = (begin >= 0) & (begin < used)
        if self._past and len(fresh):
            fresh[0] = False  # the rest of a document that began in earlier rows
        size = self._length
        apart = fresh & (begin // size != (ends - 1) // size)
        self._cost.cut_long += int((apart & (lengths > size)).sum())
        self._cost.cut_short += int((apart & (lengths <= size)).sum())

    def _keep(self, starts: Int64, lengths: Int64, ends: Int64, used: int) -> None:
        at = int(np.searchsorted(ends, used, side="right"))
        self._starts, self._lengths = starts[at:].copy(), lengths[at:].copy()
        if at < len(starts):
            gone = used - int(ends[at] - lengths[at])
            self._starts[0] += gone
            self._lengths[0] -= gone
            self._past = gone
