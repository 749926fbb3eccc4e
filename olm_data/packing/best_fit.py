"""Packing `best_fit`: pieces of documents into rows of S tokens, by best-fit decreasing.

    lengths of pieces -> histogram of lengths -> best-fit decreasing on whole groups:
         "so many pieces of this length go into each of these rows"            (`fill`)
      -> which piece lies where, vectorised                                    (`best_fit`)

Best-fit decreasing puts each piece, longest first, into the fullest row that still has room. Equal
lengths make equal decisions, so the histogram decides for all of them at once: the work of the loop
depends on the number of different lengths, not of documents. Pure: integers in, integers out.

Source: best-fit decreasing as in Johnson, Near-optimal bin packing algorithms (1973).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_INDEX_BITS = 24
MOST_PIECES = 1 << _INDEX_BITS
"""Pieces packed at once; a longer source is packed window by window, in fixed memory."""

_BLOCK = 1 << 10

Int64 = NDArray[np.int64]
Uint64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Which pieces lie in which row.

    Attributes:
        order: int64 [p], numbers of the pieces, row by row.
        starts: int64 [rows + 1], row r holds `order[starts[r]:starts[r + 1]]`.
    """

    order: Int64
    starts: Int64


@dataclass(frozen=True, slots=True)
class Move:
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


def fill(counts: Int64, sequence_length: int) -> tuple[list[Move], int]:
    """Decide best-fit decreasing for a histogram of piece lengths.

    Args:
        counts: int64 [S + 1], pieces of each length.

    Returns:
        the moves, which take the pieces in descending order of length, and the number of rows.
    """
    moves: list[Move] = []
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
            moves.append(Move(first, taken, each, slot))
            left -= taken * each
            open_rows.put(room, first + taken, run - taken, slot)
            open_rows.put(room - each * length, first, taken, slot + each)
    return moves, rows


def best_fit(lengths: Int64, ties: Uint64, sequence_length: int) -> Rows:
    """Pack pieces into rows, best-fit decreasing.

    Args:
        lengths: int64 [p], tokens of each piece, 1 .. S; p is at most `MOST_PIECES`.
        ties: uint64 [p], decides the order among pieces of equal length (its highest bits, then
            the piece's number), so that which document meets which does not follow the source.
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
    return Rows(order, starts)


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
    """Return the place of the lowest set bit."""
    return (bits & -bits).bit_length() - 1
