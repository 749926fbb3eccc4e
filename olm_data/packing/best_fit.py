"""Packing `best_fit`: pieces of documents into rows of S tokens, by best-fit decreasing.

    documents longer than a row -> full rows and a remainder                (`pack_best_fit`)
    lengths of pieces -> histogram of lengths -> best-fit decreasing on whole groups:
         "so many pieces of this length go into each of these rows"            (`fill`)
      -> which piece lies where, vectorised                                    (`best_fit`)

Best-fit decreasing puts each piece, longest first, into the fullest row that still has room. Equal
lengths make equal decisions, so the histogram decides for all of them at once: the work of the loop
depends on the number of different lengths, not of documents. Pure: integers in, integers out.

Source: best-fit decreasing as in Johnson, Near-optimal bin packing algorithms (1973).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.dataset.dataset import Dataset
from olm_data.packing.base import Documents, Int64, PackedRows, Packing, PackingCost, cut_documents

_INDEX_BITS = 24
MOST_PIECES = 1 << _INDEX_BITS
"""Pieces packed at once; a longer source is packed window by window, in fixed memory."""

_BLOCK = 1 << 10

_CACHED = 1 << 15  # numbers hashed together: they stay in the processor's cache
_STEP = np.uint64(0x9E3779B97F4A7C15)

Uint64 = NDArray[np.uint64]


class BestFit(Packing, frozen=True):
    """Documents whole where they fit in a row, in as few rows as best-fit decreasing takes.

    Attributes:
        min_tail: remainders of a cut document with fewer tokens are dropped.
    """

    name: ClassVar[str] = "best_fit"

    min_tail: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 1

    def pack(
        self, dataset: Dataset, documents: Documents, sequence_length: int, cost: PackingCost
    ) -> Iterator[PackedRows]:
        """Yield the rows of each window of documents."""
        seed = f"best_fit {dataset.digest} {sequence_length}"
        key = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little")
        for starts, lengths in documents:
            yield from pack_best_fit(
                starts, lengths, sequence_length, key=key, min_tail=self.min_tail, cost=cost
            )


def pack_best_fit(
    starts: Int64,
    lengths: Int64,
    sequence_length: int,
    *,
    key: int,
    min_tail: int,
    cost: PackingCost,
) -> Iterator[PackedRows]:
    """Pack one window of documents by best-fit decreasing, the full rows of long ones first.

    Args:
        starts, lengths: int64 [d], first token and number of tokens of each document.
        key: decides which documents of equal length share a row with which others.
        min_tail: remainders of a cut document with fewer tokens are dropped.
        cost: is added to.
    """
    long = np.flatnonzero(lengths >= sequence_length)
    full = lengths[long] // sequence_length
    yield from cut_documents(starts[long], lengths[long], full, sequence_length)
    first, tails = starts.copy(), lengths.copy()
    first[long] += full * sequence_length
    tails[long] -= full * sequence_length
    keep = tails > 0
    keep[long] &= tails[long] >= min_tail
    first, tails = first[keep], tails[keep]
    packed = best_fit(tails, _mixed(first, key), sequence_length)
    rows, used = len(packed.starts) - 1, int(tails.sum())
    cost.rows += int(full.sum()) + rows
    cost.tokens += int(full.sum()) * sequence_length + used
    cost.padding += rows * sequence_length - used
    cost.cut_long += int((lengths[long] > sequence_length).sum())
    cost.dropped += int(lengths.sum()) - int(full.sum()) * sequence_length - used
    yield PackedRows(first[packed.order], tails[packed.order], np.diff(packed.starts))


@dataclass(frozen=True, slots=True)
class PiecesByRow:
    """Which pieces lie in which row.

    Attributes:
        order: int64 [p], numbers of the pieces, row by row.
        starts: int64 [rows + 1], row r holds `order[starts[r]:starts[r + 1]]`.
    """

    order: Int64
    starts: Int64


@dataclass(frozen=True, slots=True)
class Assignment:
    """`each` pieces of one length into each of `rows` rows.

    Attributes:
        row: the first of the rows.
        rows: how many rows.
        each: pieces put into each of them.
        slot: pieces each of them held before.
    """

    row: int
    rows: int
    each: int
    slot: int


def fill(counts: Int64, sequence_length: int) -> tuple[list[Assignment], int]:
    """Decide best-fit decreasing for a histogram of piece lengths.

    Args:
        counts: int64 [S + 1], pieces of each length.

    Returns:
        the moves, which take the pieces in descending order of length, and the number of rows.
    """
    moves: list[Assignment] = []
    open_rows, rows = _OpenRows(), 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            room = open_rows.tightest(length)
            if room is None:
                room, run = sequence_length, -(-left // (sequence_length // length))
                open_rows.put(room, rows, run, 0)
                rows += run
            first, run, slot = open_rows.take(room)
            each = min(room // length, left)
            taken = min(run, left // each)
            moves.append(Assignment(first, taken, each, slot))
            left -= taken * each
            open_rows.put(room, first + taken, run - taken, slot)
            open_rows.put(room - each * length, first, taken, slot + each)
    return moves, rows


def best_fit(lengths: Int64, ties: Uint64, sequence_length: int) -> PiecesByRow:
    """Pack pieces into rows, best-fit decreasing.

    Args:
        lengths: int64 [p], tokens of each piece, 1 .. S; p is at most `MOST_PIECES`.
        ties: uint64 [p], decides the order among pieces of equal length (its highest bits, then
            the piece's number), so that which documents share a row does not follow the source.
        sequence_length: S.
    """
    if len(lengths) > MOST_PIECES:
        raise ValueError(f"{len(lengths):,} pieces at once; at most {MOST_PIECES:,}")
    moves, rows = fill(np.bincount(lengths, minlength=sequence_length + 1), sequence_length)
    table = np.array([(m.row, m.rows, m.each, m.slot) for m in moves], np.int64).reshape(-1, 4)
    first, run, each, slot = table.T
    pieces = run * each
    # A move's pieces go to its rows in turn: piece `at` to row at % run, as number at // run there.
    at = np.arange(len(lengths), dtype=np.int32)
    at -= np.repeat((np.cumsum(pieces) - pieces).astype(np.int32), pieces)
    deeper, row = np.divmod(at, np.repeat(run.astype(np.int32), pieces))
    row += np.repeat(first.astype(np.int32), pieces)
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=starts[1:])
    deeper += np.repeat(slot.astype(np.int32), pieces)
    order = np.empty(len(lengths), np.int64)
    order[starts[row] + deeper] = _longest_first(lengths, ties, sequence_length)
    return PiecesByRow(order, starts)


def _longest_first(lengths: Int64, ties: Uint64, sequence_length: int) -> Int64:
    """Return the pieces' numbers by descending length, then tie, then number.

    One sort of whole keys, which is many times faster than a sort of indices and gives the same
    result whatever algorithm sorts.
    """
    tie_bits = 64 - _INDEX_BITS - sequence_length.bit_length()
    keys = (sequence_length - lengths).astype(np.uint64)
    keys <<= np.uint64(tie_bits)
    keys |= ties >> np.uint64(64 - tie_bits)
    keys <<= np.uint64(_INDEX_BITS)
    keys |= np.arange(len(lengths), dtype=np.uint64)
    keys.sort()
    keys &= np.uint64(MOST_PIECES - 1)
    return keys.view(np.int64)


class _OpenRows:
    """Rows by the room they have: runs (first row, rows, pieces in each of them).

    Bit r of a set of bits tells whether there are rows with room r; the tightest fit for a length
    is the lowest set bit from there on. The set is cut into blocks, and a bit of `_filled` tells
    which of them have any, so that a search costs the same for rows of any length.
    """

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int, int]]] = {}
        self._blocks: dict[int, int] = {}
        self._filled = 0

    def tightest(self, length: int) -> int | None:
        block, at = divmod(length, _BLOCK)
        fitting = self._blocks.get(block, 0) >> at
        if fitting:
            return length + _lowest(fitting)
        later = self._filled >> (block + 1)
        if not later:
            return None
        block += 1 + _lowest(later)
        return block * _BLOCK + _lowest(self._blocks[block])

    def put(self, room: int, first: int, rows: int, slot: int) -> None:
        if not rows or not room:
            return
        self._runs.setdefault(room, []).append((first, rows, slot))
        block, at = divmod(room, _BLOCK)
        self._blocks[block] = self._blocks.get(block, 0) | 1 << at
        self._filled |= 1 << block

    def take(self, room: int) -> tuple[int, int, int]:
        runs = self._runs[room]
        run = runs.pop()
        if not runs:
            del self._runs[room]
            block, at = divmod(room, _BLOCK)
            self._blocks[block] &= ~(1 << at)
            if not self._blocks[block]:
                self._filled &= ~(1 << block)
        return run


def _lowest(bits: int) -> int:
    """Return the number of the lowest set bit."""
    return (bits & -bits).bit_length() - 1


def _mixed(values: Int64, key: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value: the finaliser of SplitMix64 (Steele et al., 2014)."""
    mixed = np.empty(len(values), np.uint64)
    for low in range(0, len(values), _CACHED):
        z = mixed[low : low + _CACHED]
        np.multiply(values[low : low + _CACHED].view(np.uint64), _STEP, out=z)
        z += np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z ^= z >> np.uint64(shift)
            z *= np.uint64(factor)
        z ^= z >> np.uint64(31)
    return mixed
