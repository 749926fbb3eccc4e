"""The schedule: slots of a block, rows of a run, and what orders have in common."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import prp1_reference as reference
from support.stand_in import three_sources

from olm_data.order.base import Order, SourceEpochs, SourceSize
from olm_data.order.orders import ORDERS, manifest_orders
from olm_data.order.schedule import Schedule, ScheduleStage, sample_rows, schedule_sha256
from olm_data.order.slots import (
    MAX_BLOCK,
    TOLERANCE,
    compile_shares,
    largest_error,
    normalise,
    round_counts,
    slot_table,
)

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


def assert_within_tijdemans_bound(counts: list[int]) -> None:
    """|drawn - share * slots| <= 1 - 1/(2k - 2) after every slot, in integers."""
    table, block = slot_table(counts), sum(counts)
    assert np.bincount(table.source, minlength=len(counts)).tolist() == counts
    k = max(2 * sum(count > 0 for count in counts) - 2, 1)
    prefix = np.arange(1, block + 1)
    for source in np.flatnonzero(counts).tolist():
        drawn = np.cumsum(table.source == source)
        assert (np.abs(drawn * block - counts[source] * prefix) * k <= block * (k - 1)).all()


def test_slot_tables_equal_the_golden_ones() -> None:
    for case in json.loads((GOLDEN / "slots.json").read_text())["tables"]:
        table = slot_table(case["counts"])
        assert (table.source.tolist(), table.rank.tolist()) == (case["source"], case["rank"])


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any))
def test_slot_tables_equal_the_reference(counts: list[int]) -> None:
    table = slot_table(counts)
    assert (table.source.tolist(), table.rank.tolist()) == reference.slots(counts)


@given(st.lists(st.integers(0, 300) | st.sampled_from([0, 1]), min_size=1, max_size=40).filter(any))
def test_every_prefix_is_within_one_row_of_every_share(counts: list[int]) -> None:
    assert_within_tijdemans_bound(counts)


@pytest.mark.parametrize(
    "counts",
    [
        [1] * 1000,
        [65_535, 1],
        [1, 65_534, 1],
        [2**20 - 19, *[1] * 19],
        [32_768, 16_384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1],
    ],
    ids=lambda counts: f"{len(counts)} sources",
)
def test_lopsided_blocks_keep_the_bound_too(counts: list[int]) -> None:
    assert_within_tijdemans_bound(counts)


def test_a_thousand_random_sources_keep_the_bound() -> None:
    weights = [1 + int(w) for w in np.random.default_rng(0).pareto(1.0, 1000) * 1000]
    assert_within_tijdemans_bound(list(round_counts(normalise(weights), 65_536)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_slots_and_ranks_are_each_others_inverse(counts: list[int]) -> None:
    table = slot_table(counts)
    for slot, (source, rank) in enumerate(zip(table.source, table.rank, strict=True)):
        assert table.slots[table.first[source] + rank] == slot
        assert table.before(slot)[source] == rank


def test_sources_without_a_count_never_appear() -> None:
    assert set(slot_table([0, 3, 0, 2, 0]).source.tolist()) == {1, 3}


def test_a_table_cannot_be_changed() -> None:
    table = slot_table([2, 3])
    for array in (table.source, table.rank, table.slots, table.first):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize("counts", [[0], [0, 0], [-1, 2], [MAX_BLOCK, 1]])
def test_counts_that_make_no_block_are_refused(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="counts"):
        slot_table(counts)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6).filter(any))
def test_shares_with_a_small_common_denominator_are_exact(weights: list[int]) -> None:
    shares = normalise(weights)
    counts = compile_shares(shares)
    assert [Fraction(count, sum(counts)) for count in counts] == list(shares)
    assert largest_error(counts, shares) == 0


def test_the_block_of_exact_shares_is_their_common_denominator() -> None:
    assert compile_shares(normalise([85, 15])) == (17, 3)
    assert compile_shares(normalise([Fraction("0.1"), Fraction("0.2")])) == (1, 2)
    assert compile_shares(normalise([7])) == (1,)


def test_other_shares_are_rounded_within_the_tolerance() -> None:
    shares = normalise([1_000_003, 2_000_029, 3_000_017])
    counts = compile_shares(shares)
    errors = [
        abs(Fraction(count, 2**16) - share) / share
        for count, share in zip(counts, shares, strict=True)
    ]
    assert largest_error(counts, shares) == max(errors)
    assert 0 < max(errors) < TOLERANCE
    assert sum(counts) == 2**16


def test_the_block_grows_for_small_shares_and_the_best_one_is_kept() -> None:
    shares = normalise([1_000_003, 99_000_001])
    grown = compile_shares(shares)
    assert largest_error(grown, shares) < TOLERANCE
    assert 2**16 < sum(grown) <= 2**20
    assert largest_error(round_counts(shares, sum(grown) // 2), shares) >= TOLERANCE
    assert compile_shares(normalise([1, 10**9])) == (0, 2**16)  # all are as bad
    shares = normalise([7, 10**8 + 9])
    worst = {2**k: largest_error(round_counts(shares, 2**k), shares) for k in range(16, 21)}
    assert sum(compile_shares(shares)) == min(worst, key=lambda block: worst[block])


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=8), st.integers(1, 10**5))
def test_rounding_keeps_the_sum_and_moves_no_count_by_a_whole_row(
    weights: list[int], block: int
) -> None:
    shares = normalise(weights)
    counts = round_counts(shares, block)
    assert sum(counts) == block
    assert all(abs(c - s * block) < 1 for c, s in zip(counts, shares, strict=True))


def test_equal_remainders_go_to_the_earlier_source() -> None:
    assert round_counts(normalise([1, 1, 1, 1]), 6) == (2, 2, 1, 1)


@pytest.mark.parametrize("weights", [[], [0], [0, 0], [1, -1], [-1]])
def test_weights_without_meaning_are_refused(weights: list[int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        normalise(weights)


def test_shares_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        compile_shares([Fraction(1, 2)])


def draw_order(data: st.DataObject, name: str, rows: list[int]) -> Order:
    """An order as a manifest asks for it, compiled for sources of so many rows."""
    keys: dict[str, int] = {}
    if name == "windowed":
        keys = {
            "window_chunks": data.draw(st.integers(1, 5)),
            "chunk_tokens": data.draw(st.integers(1, 200)),
        }
    elif name == "olmo-core":
        keys = {"batch_rows": data.draw(st.integers(1, rows[0]))}
    sources = [SourceSize(rows=n, tokens=8 * n + 1, shards=2) for n in rows]
    order = manifest_orders()[name](**keys).compile(sources)
    if name == "arriving":  # all of it is there
        order = msgspec.structs.replace(order, ended=(True,) * len(rows))
    return order


@pytest.mark.parametrize("name", ORDERS)
@given(data=st.data())
def test_the_positions_of_an_epoch_are_different_rows_and_the_inverse_is_exact(
    name: str, data: st.DataObject
) -> None:
    sizes = st.lists(st.integers(1, 300), min_size=1, max_size=1 if name == "olmo-core" else 3)
    rows, seed = data.draw(sizes), data.draw(st.integers(0, 2**63 - 1))
    order = draw_order(data, name, rows)
    assert order.fits(rows)
    turns = order.epoch_rows(np.array(rows))
    names = tuple(f"s{i}" for i in range(len(rows)))
    for source, n in enumerate(rows):
        epoch = data.draw(st.integers(0, 5))
        every = np.arange(n)
        epochs = SourceEpochs(
            seed, names, np.full(n, source), np.full(n, n), np.full(n, epoch, np.int64)
        )
        assert sorted(order.rows_at(every, epochs)) == list(range(n))
        assert (order.positions_of(order.rows_at(every, epochs), epochs) == every).all()
        assert 0 < turns[source] <= n
        # the order of one source does not depend on the others
        alone = SourceEpochs(
            seed, (names[source],), np.zeros(n, np.int64), every * 0 + n, every * 0
        )
        first = SourceEpochs(seed, names, np.full(n, source), every * 0 + n, every * 0)
        assert (order.for_source(source).rows_at(every, alone) == order.rows_at(every, first)).all()


@pytest.mark.parametrize("name", ORDERS)
@given(data=st.data())
def test_a_schedule_finds_each_row_where_it_put_it(name: str, data: st.DataObject) -> None:
    sizes = st.lists(st.integers(1, 50), min_size=1, max_size=1 if name == "olmo-core" else 3)
    rows, seed = data.draw(sizes), data.draw(st.integers(0, 2**63 - 1))
    order = draw_order(data, name, rows)
    counts = tuple(data.draw(st.integers(1, 3)) for _ in rows)
    sources = [(f"s{i}", n) for i, n in enumerate(rows)]
    schedule = Schedule(
        seed, sources, [ScheduleStage(data.draw(st.integers(1, 200)), counts)], order
    )
    found = schedule.locate(np.arange(schedule.total_rows))
    source = data.draw(st.integers(0, len(rows) - 1))
    row = data.draw(st.integers(0, rows[source] - 1))
    wanted = np.flatnonzero((found.source == source) & (found.row == row))
    assert schedule.rows_of(source, row).tolist() == wanted.tolist()
    mine = found.source == source
    pairs = list(zip(found.epoch[mine].tolist(), found.row[mine].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "a row twice in an epoch"
