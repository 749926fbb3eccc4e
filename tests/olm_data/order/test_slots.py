"""Promises of mixing: exact shares, and every prefix of a block within one row of them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import prp1_reference as reference

from olm_data.order.slots import (
    MAX_BLOCK,
    TOLERANCE,
    compile_shares,
    normalise,
    round_counts,
    slot_table,
)

GOLDEN = Path(__file__).parent / "golden"


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
    compiled = compile_shares(shares)
    assert compiled.error == 0
    assert [Fraction(count, compiled.block) for count in compiled.counts] == list(shares)


def test_the_block_of_exact_shares_is_their_common_denominator() -> None:
    assert compile_shares(normalise([85, 15])).counts == (17, 3)
    assert compile_shares(normalise([Fraction("0.1"), Fraction("0.2")])).counts == (1, 2)
    assert compile_shares(normalise([7])).counts == (1,)


def test_other_shares_are_rounded_within_the_tolerance_and_the_error_is_told() -> None:
    shares = normalise([1_000_003, 2_000_029, 3_000_017])
    compiled = compile_shares(shares)
    errors = [
        abs(Fraction(count, compiled.block) - share) / share
        for count, share in zip(compiled.counts, shares, strict=True)
    ]
    assert compiled.error == max(errors)
    assert 0 < compiled.error < TOLERANCE
    assert compiled.block == 2**16


def test_the_block_grows_for_small_shares_and_the_best_one_is_kept() -> None:
    grown = compile_shares(normalise([1_000_003, 99_000_001]))
    assert grown.error < TOLERANCE
    assert 2**16 < grown.block <= 2**20
    hopeless = compile_shares(normalise([1, 10**9]))
    assert (hopeless.counts[0], hopeless.error, hopeless.block) == (0, 1, 2**16)
    small = compile_shares(normalise([7, 10**8 + 9]))
    blocks = [2**k for k in range(16, 21)]
    worst = [
        abs(Fraction(round_counts(normalise([7, 10**8 + 9]), b)[0], b) - Fraction(7, 10**8 + 16))
        for b in blocks
    ]
    assert small.block == blocks[worst.index(min(worst))]


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
