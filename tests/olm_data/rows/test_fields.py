"""Inputs, labels and piece offsets of a micro-batch, against the definition token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import ValidationError
from olm_data.rows.fields import IGNORED_LABEL, fill_labels, piece_offsets, piece_starts


def fields(tokens: np.ndarray, cuts: list[set[int]], capacity: int):
    """The functions under test on rows whose cuts are given as one set of places a row."""
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    places = [r * length + p for r in range(rows) for p in sorted(cuts[r])]
    flat = np.array(places, dtype=np.int64)
    ids, labels = np.full((2, rows, length), 99, dtype=np.int64)
    fill_labels(tokens, flat, ids, labels)
    offsets = piece_offsets(flat, capacity, rows, length)
    return ids, labels, piece_starts(offsets, length), offsets


def reference(tokens: np.ndarray, cuts: list[set[int]], capacity: int):
    """The definition, token by token."""
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    ids, labels, starts = [[[0] * length for _ in range(rows)] for _ in range(3)]
    offsets = []
    for r in range(rows):
        piece = 0
        for p in range(length):
            if p == 0 or p in cuts[r]:
                piece = p
                offsets.append(r * length + p)
            ids[r][p] = int(tokens[r, p])
            labels[r][p] = IGNORED_LABEL if p + 1 in cuts[r] else int(tokens[r, p + 1])
            starts[r][p] = piece
    offsets += [rows * length] * (capacity + 1 - len(offsets))
    return ids, labels, starts, offsets


@st.composite
def micro_batches(draw):
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    cuts = [draw(st.sets(st.integers(1, length))) for _ in range(rows)]
    dtype = draw(st.sampled_from([np.uint16, np.uint32]))
    seed = draw(st.integers(0, 1000))
    high = np.iinfo(dtype).max
    tokens = np.random.default_rng(seed).integers(0, high, (rows, length + 1), dtype, endpoint=True)
    return tokens, cuts


@given(micro_batches())
def test_fields_equal_the_definition_token_by_token(batch):
    tokens, cuts = batch
    capacity = tokens.size
    for got, wanted in zip(
        fields(tokens, cuts, capacity), reference(tokens, cuts, capacity), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


@given(micro_batches())
def test_offsets_start_at_zero_rise_and_repeat_the_end_only_at_the_tail(batch):
    tokens, cuts = batch
    *_, offsets = fields(tokens, cuts, capacity=tokens.size)
    end = tokens.shape[0] * (tokens.shape[1] - 1)
    steps = np.diff(offsets)
    pieces = np.count_nonzero(steps)
    assert (offsets[0], offsets[-1]) == (0, end)
    assert (steps[:pieces] > 0).all()
    assert (offsets[pieces:] == end).all()


def test_offsets_have_the_same_length_whatever_the_documents_are():
    tokens = np.zeros((2, 9), dtype=np.uint16)
    lengths = {
        len(fields(tokens, cuts, capacity=10)[-1])
        for cuts in ([set(), set()], [{8}, {1, 2, 3}], [{1, 2, 3, 4}, {4, 5, 6, 7}])
    }
    assert lengths == {11}


def test_more_pieces_than_promised_are_refused():
    tokens = np.zeros((1, 9), dtype=np.uint16)
    assert len(fields(tokens, [{2, 4}], capacity=3)[-1]) == 4
    with pytest.raises(ValidationError, match="3 pieces of documents; 2 were promised"):
        fields(tokens, [{2, 4}], capacity=2)


def test_a_cut_given_twice_makes_no_piece_of_length_zero():
    offsets = piece_offsets(np.array([3, 3]), 3, 1, 8)
    assert offsets.tolist() == [0, 3, 8, 8]
