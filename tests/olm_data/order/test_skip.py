"""Skipped row ranges: arithmetic between global rows and kept indices, against a plain list."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_data.order.steps import KeptRows, clip_ranges, merge_ranges

TOTAL = 60
ranges = st.lists(
    st.tuples(st.integers(0, TOTAL - 1), st.integers(1, TOTAL)).filter(lambda r: r[0] < r[1]),
    max_size=6,
)


@given(ranges)
def test_kept_rows_are_the_schedule_without_the_skipped_ranges(skip):
    wanted = [r for r in range(TOTAL) if not any(a <= r < b for a, b in skip)]
    kept = KeptRows(TOTAL, skip)
    assert (kept.count, kept.rows(np.arange(kept.count)).tolist()) == (len(wanted), wanted)
    places = {row: index for index, row in enumerate(wanted)}
    assert kept.index(np.arange(TOTAL)).tolist() == [places.get(row, -1) for row in range(TOTAL)]
    assert [kept.before(r) for r in range(TOTAL + 1)] == [
        sum(w < r for w in wanted) for r in range(TOTAL + 1)
    ]


@given(ranges, st.integers(0, TOTAL), st.integers(0, TOTAL))
def test_merging_and_clipping_keep_the_same_rows(skip, start, stop):
    merged = merge_ranges(skip)
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(merged))
    rows = {r for a, b in skip for r in range(a, b)}
    assert {r for a, b in merged for r in range(a, b)} == rows
    clipped = {r for a, b in clip_ranges(merged, start, stop) for r in range(a, b)}
    assert clipped == {r for r in rows if start <= r < stop}


@pytest.mark.parametrize(
    "bad", [[1], [2, 2], [3, 1], [-1, 4], [0, 1.5], ["0", "4"], "ab", [0, True]]
)
def test_a_malformed_range_is_refused_with_an_example(bad):
    with pytest.raises(UsageError, match="is not a range of rows") as caught:
        KeptRows(TOTAL, [bad])
    assert "skip: [[4096, 8192]]" in str(caught.value)


def test_a_range_beyond_the_schedule_is_refused():
    with pytest.raises(UsageError, match=r"reaches beyond the schedule of 60 rows"):
        KeptRows(TOTAL, [[50, 61]])
