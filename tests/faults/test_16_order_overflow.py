"""Row 16: runs and sources beyond 2^32 rows, up to 2^50 and more, are exact, or refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from support import prp1_reference as reference
from support.stand_in import compiled

from olm_data.errors import UsageError
from olm_data.order.prp import MAX_ROWS
from olm_data.order.schedule import Schedule, ScheduleStage
from olm_data.order.slots import slot_table
from olm_data.packing.concat import row_span, rows_in

HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33 + 7, 2**40, 2**50 - 1, 2**50]


def slow_locate(
    row: int, seed: int, sources: list[tuple[str, int]], stages: list[tuple[int, list[int]]]
) -> tuple[int, int, int, int]:
    """`Schedule.locate` of one row in Python integers, which cannot overflow."""
    base = [0] * len(sources)
    for number, (rows, counts) in enumerate(stages):
        table, ranks = reference.slots(counts)
        if row >= rows:
            row -= rows
            blocks, rest = divmod(rows, len(table))
            for s in range(len(sources)):
                base[s] += blocks * counts[s] + table[:rest].count(s)
            continue
        block, slot = divmod(row, len(table))
        s = table[slot]
        name, n = sources[s]
        epoch, p = divmod(base[s] + block * counts[s] + ranks[slot], n)
        return number, s, epoch, reference.permute(p, n, reference.keys(seed, name, epoch))
    raise AssertionError("row beyond the run")


@pytest.mark.parametrize("rows", HUGE)
def test_places_in_huge_runs_equal_those_of_unbounded_integers(rows: int) -> None:
    sources = [("huge", rows), ("large", 2**33 + 1), ("small", 1001)]
    stages = [(rows, [5, 3, 1]), (2 * rows + 1, [2, 5, 4])]
    schedule = Schedule(3, sources, [ScheduleStage(n, tuple(counts)) for n, counts in stages])
    assert schedule.total_rows == 3 * rows + 1
    picks = [0, 1, rows // 2, rows - 1, rows, rows + 1, 2 * rows, 3 * rows]
    place = schedule.locate(picks)
    found = zip(
        place.stage.tolist(),
        place.source.tolist(),
        place.epoch.tolist(),
        place.row.tolist(),
        strict=True,
    )
    assert list(found) == [slow_locate(row, 3, sources, stages) for row in picks]


@pytest.mark.parametrize("rows", HUGE)
def test_the_inverse_finds_the_same_rows_in_huge_runs(rows: int) -> None:
    schedule = Schedule(3, [("a", rows), ("b", rows // 2)], [ScheduleStage(2 * rows, (3, 1))])
    picks = np.array([0, rows // 3, rows, 2 * rows - 1])
    place = schedule.locate(picks)
    for pick, source, row in zip(picks, place.source, place.row, strict=True):
        assert pick in schedule.rows_of(int(source), int(row))


def test_the_largest_run_is_2_to_the_62_rows_and_one_more_is_refused() -> None:
    schedule = Schedule(0, [("a", MAX_ROWS)], [ScheduleStage(MAX_ROWS, (1,))])
    last = schedule.locate([MAX_ROWS - 1])
    assert schedule.rows_of(0, int(last.row[0])).tolist() == [MAX_ROWS - 1]
    with pytest.raises(ValueError, match="at most 2\\^62 rows"):
        Schedule(0, [("a", 5)], [ScheduleStage(MAX_ROWS, (1,)), ScheduleStage(1, (1,))])


def test_the_largest_slot_table_is_exact() -> None:
    """B = 2^20 with 2^19 sources: the products of release and deadline come near 2^60."""
    counts = [1] * (2**19 - 1) + [2**19 + 1]
    table = slot_table(counts)
    assert np.bincount(table.source).tolist() == counts
    drawn = np.cumsum(table.source == len(counts) - 1)
    share = Fraction(counts[-1], 2**20)
    slots = np.arange(1, 2**20 + 1)
    assert (np.abs(drawn * share.denominator - slots * share.numerator) < share.denominator).all()


def test_spans_of_rows_beyond_2_to_the_32_tokens_are_exact() -> None:
    tokens = 2**51 + 12_345
    last = rows_in(tokens, 2048) - 1
    assert row_span(last, 2048) == (2048 * last, 2048 * last + 2049)
    assert tokens - 2048 <= row_span(last, 2048)[1] <= tokens


def test_a_manifest_of_2_to_the_50_rows_compiles_and_a_run_beyond_2_to_the_62_is_refused() -> None:
    text = (
        "{{version: 1, sequence_length: 2048, sources: {{a: {{data: x}}, b: {{data: y}}}}, "
        "stages: [{{name: m, tokens: {0}, weights: {{a: 2, b: 1}}}},"
        " {{name: n, tokens: {0}, weights: {{a: 1}}}}]}}"
    )
    lock = compiled(text.format(2**61), tokens=2**61)
    assert lock.total_rows == 2**51
    assert lock.stages[0].rows_by_source == (2 * 2**50 // 3 + 1, 2**50 // 3)
    assert sum(lock.stages[0].rows_by_source) == 2**50
    assert int(lock.schedule().locate([2**51 - 1]).stage[0]) == 1
    with pytest.raises(UsageError, match="more than 2\\^62 tokens"):
        compiled(text.format(2**61 + 1), tokens=2**61)
