"""Buffers of documents are taken apart and put together as lists of their rows are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from olm_data.encoders.base import Ids, chosen_of, concatenate, count_ids, ids_of, merged

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8)


def buffers(rows: list[list[int]]) -> Ids:
    ids = np.array([i for row in rows for i in row], np.uint32)
    return ids, np.cumsum([0, *map(len, rows)])


def rows_of(made: Ids) -> list[list[int]]:
    return [ids_of(made, k).tolist() for k in range(len(made[1]) - 1)]


@given(ROWS, st.data())
def test_a_batch_that_is_parted_is_whole_again_when_it_is_merged(
    rows: list[list[int]], data: st.DataObject
) -> None:
    flags = st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))
    chosen = np.array(data.draw(flags), dtype=bool)
    made = buffers(rows)
    one, other = chosen_of(made, chosen), chosen_of(made, ~chosen)
    assert rows_of(one) == [row for row, taken in zip(rows, chosen, strict=True) if taken]
    assert rows_of(merged(chosen, one, other)) == rows


@given(ROWS, st.sets(st.integers(0, 9)))
def test_ids_are_counted_document_by_document(rows: list[list[int]], wanted: set[int]) -> None:
    counts = count_ids(buffers(rows), np.array(sorted(wanted), np.uint32))
    assert counts.tolist() == [sum(i in wanted for i in row) for row in rows]


@given(st.lists(st.binary(max_size=5)))
def test_documents_are_one_after_another_in_their_buffer(texts: list[bytes]) -> None:
    data, offsets = concatenate(texts)
    assert data.tobytes() == b"".join(texts)
    assert offsets.tolist() == np.cumsum([0, *map(len, texts)]).tolist()
