"""Promises of concat packing: rows tile the stream, and stage boundaries never drift."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.packing import LENGTHS, documents, rows_of

from olm_data.mixture.compile_stages import rows_between
from olm_data.packing.base import PackingCost
from olm_data.packing.concat import Concat, StreamRows, row_span, rows_in, unused_tail

UNUSED: Any = None


@given(st.integers(0, 500), st.integers(1, 40))
def test_every_token_but_the_first_and_the_tail_is_a_label_exactly_once(
    tokens: int, length: int
) -> None:
    labels = []
    for row in range(rows_in(tokens, length)):
        start, stop = row_span(row, length)
        assert stop - start == length + 1
        assert stop <= tokens
        labels += range(start + 1, stop)
    assert labels == list(range(1, len(labels) + 1))
    tail = unused_tail(tokens, length)
    assert tail == tokens - (1 + len(labels) if labels else 0)
    assert tail <= length


def test_a_row_needs_one_token_more_than_its_length() -> None:
    assert [rows_in(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=10), st.integers(1, 4096))
def test_rows_of_stages_add_up_to_the_rows_of_the_run(stages: list[int], length: int) -> None:
    ends = list(itertools.accumulate(stages, initial=0))
    rows = [rows_between(a, b, length) for a, b in itertools.pairwise(ends)]
    assert sum(rows) == sum(stages) // length


@given(st.integers(0, 90), st.integers(1, 9), st.integers(0, 89), st.integers(1, 30))
def test_the_rows_with_some_tokens_are_those_that_have_one_of_them_as_an_input(
    tokens: int, length: int, start: int, size: int
) -> None:
    rows = StreamRows(rows_in(tokens, length), length)
    wanted = []
    for row in range(rows.rows):
        ((first, held),) = rows.pieces(row)
        assert (first, first + held) == row_span(row, length)
        if max(first, start) < min(first + length, start + size):
            wanted.append(row)
    assert rows.rows_with(start, start + size).tolist() == wanted


@given(LENGTHS, st.integers(1, 20), st.lists(st.integers(0, 40), max_size=4), st.integers(0, 3))
def test_a_stream_has_the_same_rows_in_any_windows(
    lengths: list[int], sequence_length: int, cuts: list[int], gap: int
) -> None:
    starts, sizes = documents(lengths, gap)
    cost = PackingCost()
    edges = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]
    windows = [(starts[a:b], sizes[a:b]) for a, b in itertools.pairwise(edges)]
    rows = rows_of(Concat().pack(UNUSED, windows, sequence_length, cost))
    stream = [t for a, n in zip(starts.tolist(), lengths, strict=True) for t in range(a, a + n)]
    wanted = [
        stream[slice(*row_span(r, sequence_length))]
        for r in range(rows_in(len(stream), sequence_length))
    ]
    assert [[t for start, size in row for t in range(start, start + size)] for row in rows] == (
        wanted
    )
    owner = {t: d for d, (a, n) in enumerate(zip(starts.tolist(), lengths, strict=True))
             for t in range(a, a + n)}  # fmt: skip
    for row in rows:  # pieces end where documents end, but for the last of the row
        for (start, size), (following, _) in itertools.pairwise(row):
            assert owner[start + size - 1] != owner[following]
    # cut: the document of a row's last input goes on as the next row's first
    apart = {owner[one[-1]] for one in wanted if owner[one[-2]] == owner[one[-1]]}
    assert cost.cut_long + cost.cut_short == len(apart)
    assert cost.cut_long == sum(lengths[d] > sequence_length for d in apart)
    assert cost.dropped == unused_tail(len(stream), sequence_length)
