"""Row 16: counts beyond 2^31 and 2^32, up to 2^50 and more, are exact, or refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import prp1_reference as reference
from support.plans import plan_of
from support.small_datasets import write_dataset
from support.stand_in import compiled

from olm_data.dataset.account import InputAccount, check_accounts, totals_by_input
from olm_data.dataset.inputs import Unit
from olm_data.dataset.record import HEADER_BYTES, TOKENS, npy_header, window_counts
from olm_data.dataset.shard import ENDS, Shard
from olm_data.errors import UsageError
from olm_data.order.prp import MAX_ROWS
from olm_data.order.schedule import Schedule, ScheduleStage
from olm_data.order.slots import slot_table
from olm_data.packing.concat import row_span, rows_in
from olm_data.storage.store import Store
from olm_data.tokenization.batches import delimit
from olm_data.tokenization.recipe import parse_budget

ENDS_OF = np.array([2**31 - 1, 2**31 + 5, 2**32 + 7, 2**32 + 9], np.uint64)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_16_tokens_beyond_2_to_the_32_are_read_where_they_are(dtype: str, tmp_path: Path) -> None:
    kind, total = np.dtype(dtype), int(ENDS_OF[-1])
    with open(tmp_path / f"shard-00000{TOKENS}", "wb") as file:  # sparse: 8 and 17 GB of nothing
        file.write(npy_header(kind, total))
        file.truncate(HEADER_BYTES + total * kind.itemsize)
        for place in (2**31 - 2, 2**32 + 6, total - 1):
            file.seek(HEADER_BYTES + place * kind.itemsize)
            file.write(np.array([place % 60_000], kind).tobytes())
    ends = npy_header(np.dtype(np.uint64), 4) + ENDS_OF.tobytes()
    (tmp_path / f"shard-00000{ENDS}").write_bytes(ends)
    manifest = msgspec.structs.replace(write_dataset(tmp_path / "small", [[[1]]]), dtype=kind.name)
    info = msgspec.structs.replace(manifest.shards[0], tokens=total, documents=4)
    shard = Shard(Store(tmp_path), manifest, info, verify="off")
    last = (total - 1) % 60_000
    assert shard.read(2**31 - 3, 2**31).tolist() == [0, (2**31 - 2) % 60_000, 0]
    assert shard.read(2**32 + 5, total).tolist() == [0, (2**32 + 6) % 60_000, 0, last]
    assert np.load(tmp_path / f"shard-00000{TOKENS}", mmap_mode="r")[total - 1] == last


def test_16_window_counts_of_ends_beyond_2_to_the_32_are_exact() -> None:
    counts = window_counts(ENDS_OF)
    assert list(counts["64"]) == [2, 1, 1]  # starts at 0 | 2^31 - 1, 2^31 + 5 | 2^32 + 7
    assert all(last <= most for most, _, last in counts.values())


def test_16_a_plan_of_exabytes_covers_every_byte_once() -> None:
    size, cut = 2**62, 2**58 + 3
    units = [(0, at, min(at + cut, size), min(cut, size - at)) for at in range(0, size, cut)]
    plan = plan_of([("a", size, "r")], units, 2**60)
    covered = [plan.units[k] for start, stop in plan.tasks for k in range(start, stop)]
    assert [msgspec.structs.astuple(unit) for unit in covered] == units
    assert sum(plan.text_bytes(task) for task in range(len(plan.tasks))) == size


@given(counts=st.lists(st.integers(0, 2**60), min_size=2, max_size=9))
def test_16_accounts_add_up_whatever_their_size(counts: list[int]) -> None:
    accounts = [
        InputAccount(
            input=0,
            units=((k, k + 1),),
            documents=n,
            held_out=0,
            dropped={"empty": n},
            special_hits=0,
            bad=(),
            sha256="",
        )
        for k, n in enumerate(counts)
    ]
    total = totals_by_input(accounts)[0]
    assert total.documents_in == 2 * sum(counts)
    sums: dict[str, Any] = {"held_out": 0, "dropped": {"empty": sum(counts)}}
    units = [Unit(input=0, start=k, stop=k + 1, bytes=1) for k in range(len(counts))]
    check_accounts("t", units, accounts, documents=sum(counts), **sums)


def test_16_a_share_of_2_to_the_63_records_is_exact() -> None:
    budget = parse_budget("0.1%")
    assert budget.allows(2**63 // 1000, 2**63)
    assert not budget.allows(2**63 // 1000 + 1, 2**63)


def test_16_offsets_stay_64_bit_through_the_marks() -> None:
    none, chosen = np.zeros(0, np.uint32), np.ones(3, bool)
    ids, offsets = delimit(none, np.zeros(4, np.int64), chosen, bos=1, eos=2)
    assert (ids.dtype, offsets.dtype) == (np.uint32, np.int64)
    assert offsets.tolist() == [0, 2, 4, 6]


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
def test_16_places_in_huge_runs_equal_those_of_unbounded_integers(rows: int) -> None:
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
def test_16_the_inverse_finds_the_same_rows_in_huge_runs(rows: int) -> None:
    schedule = Schedule(3, [("a", rows), ("b", rows // 2)], [ScheduleStage(2 * rows, (3, 1))])
    picks = np.array([0, rows // 3, rows, 2 * rows - 1])
    place = schedule.locate(picks)
    for pick, source, row in zip(picks, place.source, place.row, strict=True):
        assert pick in schedule.rows_of(int(source), int(row))


def test_16_the_largest_run_is_2_to_the_62_rows_and_one_more_is_refused() -> None:
    schedule = Schedule(0, [("a", MAX_ROWS)], [ScheduleStage(MAX_ROWS, (1,))])
    last = schedule.locate([MAX_ROWS - 1])
    assert schedule.rows_of(0, int(last.row[0])).tolist() == [MAX_ROWS - 1]
    with pytest.raises(ValueError, match="at most 2\\^62 rows"):
        Schedule(0, [("a", 5)], [ScheduleStage(MAX_ROWS, (1,)), ScheduleStage(1, (1,))])


def test_16_the_largest_slot_table_is_exact() -> None:
    """B = 2^20 with 2^19 sources: the products of release and deadline come near 2^60."""
    counts = [1] * (2**19 - 1) + [2**19 + 1]
    table = slot_table(counts)
    assert np.bincount(table.source).tolist() == counts
    drawn = np.cumsum(table.source == len(counts) - 1)
    share = Fraction(counts[-1], 2**20)
    slots = np.arange(1, 2**20 + 1)
    assert (np.abs(drawn * share.denominator - slots * share.numerator) < share.denominator).all()


def test_16_spans_of_rows_beyond_2_to_the_32_tokens_are_exact() -> None:
    tokens = 2**51 + 12_345
    last = rows_in(tokens, 2048) - 1
    assert row_span(last, 2048) == (2048 * last, 2048 * last + 2049)
    assert tokens - 2048 <= row_span(last, 2048)[1] <= tokens


def test_16_a_manifest_of_2_to_the_50_rows_compiles_and_a_run_beyond_2_to_the_62_is_refused() -> (
    None
):
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
