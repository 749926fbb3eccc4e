"""Best-fit packing: nothing lost, no row overfull, the same decisions as one piece at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.packing import LENGTHS, documents, inputs, rows_of

from olm_data.packing import best_fit as module
from olm_data.packing.base import PackingCost
from olm_data.packing.best_fit import best_fit, fill, pack_best_fit

# a length of a row, up to far more than one block of rooms, and pieces that fit into it
ROWS = st.one_of(st.integers(1, 60), st.integers(1, 1 << 13), st.sampled_from([1023, 1024, 2048]))
PIECES = ROWS.flatmap(
    lambda size: st.tuples(st.lists(st.integers(1, size), max_size=60), st.just(size))
)


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


@given(PIECES, st.integers(0, 2**64 - 1))
def test_each_piece_lies_in_one_row_and_no_row_is_overfull(
    pieces: tuple[list[int], int], seed: int
) -> None:
    sizes, sequence_length = np.array(pieces[0], np.int64), pieces[1]
    ties = np.random.default_rng(seed).integers(0, 2**64, len(sizes), dtype=np.uint64)
    rows = best_fit(sizes, ties, sequence_length)
    assert (sorted(rows.order.tolist()), rows.starts[0]) == (list(range(len(sizes))), 0)
    assert rows.starts[-1] == len(sizes)
    spans = zip(rows.starts[:-1], rows.starts[1:], strict=True)
    room = [sequence_length - int(sizes[rows.order[a:b]].sum()) for a, b in spans]
    assert sorted(room) == one_by_one(sizes.tolist(), sequence_length)


@given(PIECES)
def test_ties_choose_documents_and_never_the_shape_of_rows(pieces: tuple[list[int], int]) -> None:
    sizes, sequence_length = np.array(pieces[0], np.int64), pieces[1]
    packed = [
        best_fit(sizes, rng.integers(0, 2**64, len(sizes), np.uint64), sequence_length)
        for rng in map(np.random.default_rng, (0, 1))
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


@given(LENGTHS, st.integers(1, 20), st.integers(0, 3))
def test_best_fit_rows_hold_every_token_once_and_name_the_one_that_follows(
    lengths: list[int], sequence_length: int, gap: int
) -> None:
    starts, sizes = documents(lengths, gap)
    cost = PackingCost()
    packed = pack_best_fit(starts, sizes, sequence_length, key=7, min_tail=1, cost=cost)
    rows = rows_of(packed)
    seen = [t for row in rows for t in inputs(row, sequence_length)]
    places = [t for a, n in zip(starts.tolist(), lengths, strict=True) for t in range(a, a + n)]
    assert sorted(seen) == places
    ends = set((starts + sizes).tolist())
    for row in rows:
        total = sum(size for _, size in row)
        assert total <= sequence_length + 1
        if total == sequence_length + 1:  # one document that goes on
            assert len(row) == 1
            assert row[0][0] + sequence_length not in ends
        else:
            assert all(start + size in ends for start, size in row)
    assert (cost.rows, cost.tokens, cost.dropped) == (len(rows), len(places), 0)
    assert cost.padding == len(rows) * sequence_length - len(places)
    assert (cost.cut_long, cost.cut_short) == (sum(n > sequence_length for n in lengths), 0)


@given(LENGTHS, st.integers(1, 20), st.integers(1, 8))
def test_only_remainders_shorter_than_min_tail_are_dropped_and_counted(
    lengths: list[int], sequence_length: int, min_tail: int
) -> None:
    starts, sizes = documents(lengths, gap=1)
    cost = PackingCost()
    rows = rows_of(
        pack_best_fit(starts, sizes, sequence_length, key=7, min_tail=min_tail, cost=cost)
    )
    seen = sorted(t for row in rows for t in inputs(row, sequence_length))
    kept = []
    for start, size in zip(starts.tolist(), lengths, strict=True):
        tail = size % sequence_length
        cut = tail if size > sequence_length and tail < min_tail else 0
        kept += range(start, start + size - cut)
    assert seen == kept
    assert (cost.tokens, cost.dropped) == (len(kept), sum(lengths) - len(kept))
    assert cost.padding == len(rows) * sequence_length - len(kept)
