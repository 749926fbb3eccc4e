"""Bounds on the documents of a window: never exceeded, whatever the lengths and the shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.dataset.record import documents_bound, stream_windows, window_counts

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=30)


def ends_of(lengths: list[int]) -> np.ndarray:
    return np.cumsum(lengths).astype(np.uint64)


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.integers(1, 400))
def test_no_window_touches_more_documents_than_the_bound(
    shards: list[list[int]], width: int
) -> None:
    counts = [(sum(shard), len(shard), window_counts(ends_of(shard))) for shard in shards]
    bound = documents_bound(stream_windows(counts), width)
    ends = ends_of([n for shard in shards for n in shard])
    starts = np.concatenate([[0], ends[:-1]])
    for first in range(int(ends[-1])):
        assert np.sum((starts < first + width) & (ends > first)) <= bound


@given(LENGTHS)
def test_the_counts_of_a_shard_end_with_the_first_width_that_covers_it(lengths: list[int]) -> None:
    counts = window_counts(ends_of(lengths))
    widths = list(map(int, counts))
    assert widths == [64 << k for k in range(len(widths))]
    assert widths[-1] >= sum(lengths) > (widths[-1] // 2 if len(widths) > 1 else 0)
    assert counts[str(widths[-1])] == (len(lengths),) * 3


@pytest.mark.parametrize(("bounds", "width", "most"), [({}, 7, 7), ({"64": 3}, 200, 13)])
def test_a_width_that_was_not_counted_is_bounded_by_those_that_were(
    bounds: dict[str, int], width: int, most: int
) -> None:
    assert documents_bound(bounds, width) == most


def test_without_documents_nothing_begins() -> None:
    assert window_counts(np.zeros(0, np.uint64)) == {}
    assert stream_windows([]) == {}
