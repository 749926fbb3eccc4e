"""Best-fit packing: nothing lost, no row overfull, the same decisions as one piece at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.mixture import best_fit as module
from olm_data.mixture.best_fit import best_fit, cut, fill

LENGTHS = st.lists(st.integers(0, 60), max_size=60)


def one_by_one(lengths: list[int], sequence_length: int) -> list[int]:
    """Best-fit decreasing, a piece at a time: the room left in each row, ascending."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(left, row) for row, left in enumerate(room) if left >= length]
        if fitting:
            room[min(fitting)[1]] -= length
        else:
            room.append(sequence_length - length)
    return sorted(room)


@given(LENGTHS, st.integers(1, 20), st.integers(1, 8))
def test_cutting_keeps_every_token_but_the_counted_tails(
    lengths: list[int], sequence_length: int, min_tail: int
) -> None:
    documents = np.array(lengths, np.int64)
    pieces = cut(documents, sequence_length, min_tail)
    assert ((pieces.length >= 1) & (pieces.length <= sequence_length)).all()
    assert pieces.length.sum() + pieces.dropped == documents.sum()
    for number, length in enumerate(lengths):
        mine = pieces.document == number
        spans = list(zip(pieces.offset[mine].tolist(), pieces.length[mine].tolist(), strict=True))
        at = 0
        for offset, size in spans:  # they tile the document from its start
            assert offset == at
            at += size
        assert at == length or (length > sequence_length and 0 < length - at < min_tail)
        if length <= sequence_length:
            assert len(spans) == (length > 0)  # never cut without need


@given(LENGTHS, st.integers(1, 60), st.integers(0, 2**64 - 1))
def test_each_piece_lies_in_one_row_and_no_row_is_overfull(
    lengths: list[int], sequence_length: int, seed: int
) -> None:
    sizes = cut(np.array(lengths, np.int64), sequence_length).length
    ties = np.random.default_rng(seed).integers(0, 2**64, len(sizes), dtype=np.uint64)
    rows = best_fit(sizes, ties, sequence_length)
    assert sorted(rows.order.tolist()) == list(range(len(sizes)))
    assert rows.starts[0] == 0
    assert rows.starts[-1] == len(sizes)
    spans = zip(rows.starts[:-1], rows.starts[1:], strict=True)
    room = [sequence_length - int(sizes[rows.order[a:b]].sum()) for a, b in spans]
    assert sorted(room) == one_by_one(sizes.tolist(), sequence_length)


@given(LENGTHS, st.integers(1, 60))
def test_ties_choose_documents_and_never_the_shape_of_rows(
    lengths: list[int], sequence_length: int
) -> None:
    sizes = cut(np.array(lengths, np.int64), sequence_length).length
    packed = [
        best_fit(sizes, np.random.default_rng(s).integers(0, 2**64, len(sizes), np.uint64), n)
        for s, n in ((0, sequence_length), (1, sequence_length))
    ]
    shapes = [sizes[rows.order].tolist() for rows in packed]
    assert shapes[0] == shapes[1]
    assert packed[0].starts.tolist() == packed[1].starts.tolist()


def test_moves_are_few_however_many_pieces_there_are() -> None:
    counts = np.full(2049, 10**12, np.int64)
    counts[0] = 0
    moves, rows = fill(counts, 2048)
    assert len(moves) < 20_000
    tokens = int((counts * np.arange(2049)).sum())
    assert 0 <= rows * 2048 - tokens < rows * 2048 // 1000


def test_more_pieces_than_a_window_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 4)
    with pytest.raises(ValueError, match="5 pieces"):
        best_fit(np.ones(5, np.int64), np.zeros(5, np.uint64), 8)
