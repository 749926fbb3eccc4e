"""Steps and skipped rows: arithmetic against plain lists."""

from __future__ import annotations

import hashlib
import itertools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_data.order.steps import (
    LEFT_OVER,
    SKIPPED,
    KeptRows,
    Steps,
    StepSizes,
    clip_ranges,
    merge_ranges,
    order_digest,
)

TOTAL = 60
ranges = st.lists(
    st.tuples(st.integers(0, TOTAL - 1), st.integers(1, TOTAL)).filter(lambda r: r[0] < r[1]),
    max_size=4,
)


@st.composite
def piecewise(draw: st.DrawFn) -> StepSizes:
    gaps = draw(st.lists(st.integers(1, 6), max_size=4))
    firsts = np.cumsum([0, *gaps]).tolist()
    return StepSizes(tuple((first, draw(st.integers(1, 9))) for first in firsts))


@given(data=st.data(), skip=ranges)
def test_every_row_is_in_its_step_skipped_or_left_over(skip, data):
    sizes = data.draw(piecewise() | st.builds(StepSizes.constant, st.integers(1, 20)))
    steps = Steps(TOTAL, sizes, skip)
    wanted = {int(r): (t, i) for t in range(steps.count) for i, r in enumerate(steps.rows(t))}
    step, place = steps.step_of(np.arange(TOTAL))
    for row in range(TOTAL):
        if row in wanted:
            assert (step[row], place[row]) == wanted[row]
        elif any(a <= row < b for a, b in skip):
            assert step[row] == SKIPPED
        else:
            assert step[row] == LEFT_OVER
    assert len(wanted) == KeptRows(TOTAL, skip).count - steps.leftover
    assert 0 <= steps.leftover < sizes.size(steps.count)


def test_a_step_that_is_not_there_is_refused_with_those_that_are():
    steps = Steps(TOTAL, StepSizes.constant(8), [(8, 16)])
    assert steps.rows(1).tolist() == list(range(16, 24))
    with pytest.raises(UsageError, match="numbered from 1 to 6"):
        steps.rows(6)
    with pytest.raises(UsageError, match="no step 0"):
        steps.rows(-1)
    with pytest.raises(UsageError, match="fewer than a step's 61"):
        Steps(TOTAL, StepSizes.constant(61)).rows(0)
    with pytest.raises(UsageError, match="a step of 0 rows"):
        StepSizes.constant(0)


def test_the_order_digest_is_the_documented_one_and_names_the_lock():
    rows = np.array([3, 1 << 40], np.int64)
    lock = "ab" * 32
    raw = lock.encode() + b"\3" + bytes(7) + bytes(5) + b"\1\0\0"
    assert order_digest(lock, rows) == hashlib.sha256(raw).hexdigest()
    assert order_digest("cd" * 32, rows) != order_digest(lock, rows)
    assert order_digest(lock, rows[::-1]) != order_digest(lock, rows)


@given(piecewise(), st.integers(0, 200))
def test_each_number_is_in_exactly_one_step_and_the_sizes_know_it_both_ways(sizes, total):
    held = [step for step in range(210) for _ in range(sizes.size(step))]
    firsts = [held.index(step) for step in range(200)]
    assert [sizes.before(step) for step in range(200)] == firsts
    step, place = sizes.locate(np.arange(200))
    assert step.tolist() == held[:200]
    assert place.tolist() == [n - firsts[held[n]] for n in range(200)]
    assert sizes.count(total) == held[total]
    assert sizes.steps_to(total) == next(t for t in range(210) if sizes.before(t) >= total)


@given(piecewise(), st.integers(0, 12), st.integers(0, 12))
def test_stretches_are_the_parts_of_one_size_in_order(sizes, start, length):
    parts = list(sizes.of_one_size(range(start, start + length)))
    assert [t for part, _ in parts for t in part] == list(range(start, start + length))
    assert all(sizes.size(t) == size for part, size in parts for t in part)
    assert all(a != b for (_, a), (_, b) in pairwise(parts))


@given(piecewise(), st.integers(0, 30))
def test_sizes_until_a_step_say_all_of_its_past_and_nothing_else(sizes, step):
    other = StepSizes((*sizes.until(step).sizes_from, (max(step, 100), 10)))
    assert other.until(step) == sizes.until(step)
    steps = range(step + 1)
    assert [other.before(t) for t in steps] == [sizes.before(t) for t in steps]
    assert StepSizes.recorded(sizes.size(0), sizes.changes) == sizes


def test_a_later_size_holds_from_its_step_on():
    sizes = StepSizes.constant(8).then(2, 24).then(3, 8)
    assert sizes.sizes_from == ((0, 8), (2, 24), (3, 8))
    assert str(sizes.per(8)) == "1 tokens, 3 tokens from step 3, 1 tokens from step 4"
    assert StepSizes.constant(8).then(2, 8) == StepSizes.constant(8)
    with pytest.raises(UsageError, match="they come to steps 1, 4, 3"):
        StepSizes.constant(8).then(3, 16).then(2, 32)


def test_a_size_that_is_no_whole_number_of_rows_is_refused_by_its_name():
    with pytest.raises(UsageError, match="one of the batch_sizes is 20 tokens"):
        StepSizes(((0, 8), (3, 20))).per(8)


spans = st.lists(
    st.tuples(st.integers(0, TOTAL - 1), st.integers(1, TOTAL)).filter(lambda r: r[0] < r[1]),
    max_size=6,
)


@given(spans)
def test_kept_rows_are_the_schedule_without_the_skipped_ranges(skip):
    wanted = [r for r in range(TOTAL) if not any(a <= r < b for a, b in skip)]
    kept = KeptRows(TOTAL, skip)
    assert (kept.count, kept.rows(np.arange(kept.count)).tolist()) == (len(wanted), wanted)
    places = {row: index for index, row in enumerate(wanted)}
    assert kept.index(np.arange(TOTAL)).tolist() == [places.get(row, -1) for row in range(TOTAL)]
    assert [kept.before(r) for r in range(TOTAL + 1)] == [
        sum(w < r for w in wanted) for r in range(TOTAL + 1)
    ]


@given(spans, st.integers(0, TOTAL), st.integers(0, TOTAL))
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
