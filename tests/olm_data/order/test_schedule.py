"""A schedule draws each row of a source once an epoch, and knows where."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import prp1_reference as reference
from support.stand_in import three_sources

from olm_data.order.schedule import Schedule, ScheduleStage, sample_rows, schedule_sha256

GOLDEN = Path(__file__).parent / "golden"

small_runs = st.integers(1, 4).flatmap(
    lambda sources: st.tuples(
        st.lists(st.integers(1, 30), min_size=sources, max_size=sources),
        st.lists(
            st.tuples(
                st.integers(0, 80),
                st.lists(st.integers(0, 6), min_size=sources, max_size=sources).filter(any),
            ),
            min_size=1,
            max_size=3,
        ),
    )
)


def make(rows: list[int], stages: list[tuple[int, list[int]]], seed: int = 5) -> Schedule:
    sources = [(f"source-{i}", n) for i, n in enumerate(rows)]
    return Schedule(seed, sources, [ScheduleStage(n, tuple(counts)) for n, counts in stages])


def test_a_whole_schedule_equals_the_golden_one() -> None:
    golden = json.loads((GOLDEN / "schedule.json").read_text())
    stages = [ScheduleStage(rows, tuple(counts)) for rows, counts in golden["stages"]]
    schedule = Schedule(golden["seed"], [tuple(s) for s in golden["sources"]], stages)
    place = schedule.locate(np.arange(schedule.total_rows))
    columns = np.stack([place.stage, place.source, place.epoch, place.row], axis=1)
    assert columns.tolist() == golden["rows"]


@given(run=small_runs, seed=st.integers(0, 2**63 - 1))
def test_locate_equals_the_reference_for_any_sources_and_stages(run: tuple, seed: int) -> None:
    rows, stages = run
    schedule = make(rows, stages, seed)
    place = schedule.locate(np.arange(schedule.total_rows))
    expected = reference.schedule(seed, [(f"source-{i}", n) for i, n in enumerate(rows)], stages)
    found = zip(
        place.stage.tolist(),
        place.source.tolist(),
        place.epoch.tolist(),
        place.row.tolist(),
        strict=True,
    )
    assert list(found) == expected


@given(run=small_runs)
def test_rows_of_is_the_exact_inverse_of_locate(run: tuple) -> None:
    rows, stages = run
    schedule = make(rows, stages)
    place = schedule.locate(np.arange(schedule.total_rows))
    for source, n in enumerate(rows):
        for row in range(n):
            seen = np.flatnonzero((place.source == source) & (place.row == row))
            assert np.array_equal(schedule.rows_of(source, row), seen)
        some = np.arange(0, n, 2)
        found, which = schedule.sightings(source, some)
        seen = np.flatnonzero((place.source == source) & (place.row % 2 == 0))
        assert np.array_equal(found, seen)
        assert np.array_equal(which, place.row[seen])


@given(run=small_runs)
def test_drawn_before_counts_the_rows_of_each_source_up_to_any_row(run: tuple) -> None:
    schedule = make(*run)
    source = schedule.locate(np.arange(schedule.total_rows)).source
    for row in range(schedule.total_rows + 1):
        counts = np.bincount(source[:row], minlength=len(schedule.names))
        assert schedule.drawn_before(row).tolist() == counts.tolist()
    for outside in (-1, schedule.total_rows + 1):
        with pytest.raises(IndexError, match="of a run of"):
            schedule.drawn_before(outside)


def test_a_batch_split_in_any_way_is_the_same_rows() -> None:
    schedule = make([1000, 50, 333], [(500, [5, 1, 3]), (700, [1, 1, 0])])
    whole = schedule.locate(np.arange(1200))
    for size in (1, 7, 64, 1199):
        parts = [schedule.locate(np.arange(a, min(a + size, 1200))) for a in range(0, 1200, size)]
        assert np.array_equal(np.concatenate([p.row for p in parts]), whole.row)
        assert np.array_equal(np.concatenate([p.source for p in parts]), whole.source)
    assert np.array_equal(schedule.locate(np.arange(1200)[::-1]).row[::-1], whole.row)


def test_a_source_keeps_its_order_when_others_are_added_or_shares_change() -> None:
    def order(schedule: Schedule, source: int) -> list[int]:
        place = schedule.locate(np.arange(schedule.total_rows))
        return place.row[place.source == source][:50].tolist()

    alone = Schedule(1, [("web", 80)], [ScheduleStage(80, (1,))])
    mixed = Schedule(1, [("code", 10), ("web", 80)], [ScheduleStage(200, (1, 3))])
    assert order(alone, 0) == order(mixed, 1)


def test_stated_rows_by_source_spare_the_tables_of_untouched_stages() -> None:
    stages = [ScheduleStage(10, (3, 1)), ScheduleStage(10, (1, 1)), ScheduleStage(10, (1, 2))]
    computed = Schedule(1, [("a", 9), ("b", 9)], stages)
    stated = Schedule(
        1,
        [("a", 9), ("b", 9)],
        [
            ScheduleStage(10, (3, 1), (8, 2)),
            ScheduleStage(10, (1, 1), (5, 5)),
            ScheduleStage(10, (1, 2), (3, 7)),
        ],
    )
    assert len(stated._tables) == 0
    last = np.arange(20, 30)
    assert np.array_equal(stated.locate(last).row, computed.locate(last).row)
    assert list(stated._tables) == [(1, 2)]


def test_stated_rows_by_source_that_are_wrong_are_refused_when_their_stage_is_touched() -> None:
    schedule = Schedule(1, [("a", 9), ("b", 9)], [ScheduleStage(10, (3, 1), (7, 3))])
    with pytest.raises(ValueError, match="rows by source"):
        schedule.locate([0])


@pytest.mark.parametrize("rows", [[-1], [30], [0, 30], [2**62]])
def test_rows_outside_the_run_are_refused(rows: list[int]) -> None:
    with pytest.raises(IndexError):
        make([5], [(30, [1])]).locate(rows)


def test_a_drawn_source_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Schedule(0, [("a", 0)], [ScheduleStage(1, (1,))])
    assert Schedule(0, [("a", 0), ("b", 1)], [ScheduleStage(1, (0, 1))]).total_rows == 1


def test_stages_without_rows_and_empty_batches_are_legal() -> None:
    schedule = make([5, 5], [(0, [1, 1]), (4, [0, 1]), (0, [1, 0]), (3, [1, 0])])
    assert schedule.locate(np.arange(7)).stage.tolist() == [1, 1, 1, 1, 3, 3, 3]
    assert schedule.locate(np.zeros(0, np.int64)).row.shape == (0,)


def test_the_order_digest_notices_one_row_that_moved() -> None:
    old = three_sources([{"tokens": 400, "weights": {"a": 1, "b": 1}}])
    schedule, rows = old.schedule(), np.arange(old.total_rows)
    swapped = rows.copy()
    swapped[[5, 7]] = swapped[[7, 5]]
    assert schedule_sha256(schedule, rows) != schedule_sha256(schedule, swapped)


def test_a_sample_of_a_long_run_has_both_ends_and_no_row_twice() -> None:
    for rows in (1, 65_536, 65_537, 10**6 + 3, 2**50):
        sample = sample_rows(rows)
        assert (sample[0], sample[-1]) == (0, rows - 1)
        assert len(np.unique(sample)) == len(sample) == min(rows, 65_536)
