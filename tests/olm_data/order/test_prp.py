"""Permutations `prp1`: exact, inverted exactly, without a pattern."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import prp1_reference as reference

from olm_data.order.prp import MAX_ROWS, ceil_sqrt, permute, round_keys, unpermute

GOLDEN = Path(__file__).parent / "golden"
NEAR_POWERS = [2**k + d for k in range(12, 20) for d in (-1, 0, 1)] + [
    *(4**k + 1 for k in range(7, 11)),
    2**20 - 1,
    2**20,
    1000 * 1000,
    1000 * 999,
    1000 * 999 + 1,
]
HUGE = [2**k + d for k in (21, 31, 32, 33, 48, 50, 61) for d in (-1, 0, 1)] + [
    *(4**k + 1 for k in range(11, 31)),
    2**62 - 1,
    2**62,
]


def test_round_keys_and_permutations_equal_the_golden_vectors() -> None:
    golden = json.loads((GOLDEN / "prp1.json").read_text())
    for case in golden["keys"]:
        keys = round_keys(case["seed"], case["name"], case["epoch"])
        assert [f"{int(key):016x}" for key in keys] == case["keys"]
    for case in golden["permutations"]:
        keys = round_keys(case["seed"], case["name"], case["epoch"])
        assert permute(np.arange(case["n"]), case["n"], keys).tolist() == case["permutation"]
    for case in golden["samples"]:
        keys = round_keys(case["seed"], case["name"], case["epoch"])
        assert permute(case["positions"], case["n"], keys).tolist() == case["rows"]
        assert unpermute(case["rows"], case["n"], keys).tolist() == case["positions"]


@pytest.mark.slow
def test_permute_is_a_bijection_with_exact_inverse_for_every_n_up_to_4096() -> None:
    for n in range(1, 4097):
        assert_bijection(n)


@pytest.mark.parametrize("n", NEAR_POWERS)
def test_permute_is_a_bijection_near_powers_and_squares(n: int) -> None:
    assert_bijection(n)


def assert_bijection(n: int) -> None:
    positions, keys = np.arange(n), round_keys(n, "web", 0)
    rows = permute(positions, n, keys)
    assert rows.dtype == np.int64
    assert (np.bincount(rows, minlength=n) == 1).all()
    assert np.array_equal(unpermute(rows, n, keys), positions)


@pytest.mark.parametrize("n", HUGE)
def test_permute_of_huge_ranges_stays_inside_them_and_is_inverted_exactly(n: int) -> None:
    keys = round_keys(n, "web", 0)
    drawn = np.random.default_rng(0).integers(0, n, 2000)
    positions = np.unique(np.concatenate([drawn, [0, 1, n // 2, n - 2, n - 1]]))
    rows = permute(positions, n, keys)
    assert (rows >= 0).all()
    assert (rows < n).all()
    assert len(np.unique(rows)) == len(positions)
    assert np.array_equal(unpermute(rows, n, keys), positions)


@given(
    sizes=st.lists(st.integers(1, 5000) | st.integers(1, MAX_ROWS), min_size=1, max_size=20),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_each_element_may_have_its_own_range_and_keys(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    positions = [data.draw(st.integers(0, n - 1)) for n in sizes]
    keys = np.stack([round_keys(seed, "web", epoch) for epoch in range(len(sizes))])
    rows = permute(positions, sizes, keys)
    assert rows.tolist() == [
        reference.permute(p, n, reference.keys(seed, "web", epoch))
        for epoch, (p, n) in enumerate(zip(positions, sizes, strict=True))
    ]
    assert unpermute(rows, sizes, keys).tolist() == positions


def test_results_keep_the_shape_of_the_arguments_across_inner_chunks() -> None:
    keys = round_keys(1, "web", 0)
    flat = permute(np.arange(60_000), 60_000, keys)
    assert np.array_equal(
        permute(np.arange(60_000).reshape(3, 200, 100), 60_000, keys).ravel(), flat
    )
    assert permute(5, 60_000, keys).shape == ()
    assert permute(np.zeros((0,), np.int64), 7, keys).shape == (0,)
    assert permute(0, np.arange(1, 9).reshape(2, 4), keys).shape == (2, 4)


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (5, 5), (0, 0), (0, -1), (0, MAX_ROWS + 1)])
def test_positions_and_sizes_outside_their_range_are_refused(k: int, n: int) -> None:
    for function in (permute, unpermute):
        with pytest.raises(IndexError):
            function(k, n, round_keys(0, "web", 0))


def test_ceil_sqrt_is_exact_around_every_kind_of_square() -> None:
    roots = [*range(1, 2000), *(2**k + d for k in range(11, 31) for d in (-1, 0, 1)), 2**31]
    values = [r * r + d for r in roots for d in (-1, 0, 1) if 1 <= r * r + d <= MAX_ROWS]
    exact = [reference.math.isqrt(n - 1) + 1 for n in values]
    assert ceil_sqrt(np.array(values, dtype=np.uint64)).tolist() == exact


# --- Statistics: fixed seeds, so these either always pass or always fail -------------------------
def chi_square(observed: np.ndarray, expected: np.ndarray | float) -> float:
    """How many standard deviations the chi-square statistic lies from its mean."""
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def lag_correlation(rows: np.ndarray, lag: int) -> float:
    """Standard deviations of the serial correlation at `lag`."""
    x = rows - rows.mean()
    return float((x[:-lag] * x[lag:]).sum() / (x * x).sum() * len(rows) ** 0.5)


def low_bits(rows: np.ndarray, modulus: int) -> float:
    """Whether position mod m tells anything of row mod m, such as equal parities."""
    n = len(rows) // modulus * modulus  # so that all residues are equally frequent
    table = np.bincount(np.arange(n) % modulus * modulus + rows[:n] % modulus)
    return chi_square(np.pad(table, (0, modulus**2 - len(table))), n / modulus**2)


def parity_runs(rows: np.ndarray) -> float:
    """Standard deviations of the number of runs of equal parity (Wald and Wolfowitz)."""
    runs = 1 + int((np.diff(rows % 2) != 0).sum())
    return (runs - (len(rows) / 2 + 1)) / (len(rows) / 4) ** 0.5


def neighbours(rows: np.ndarray, lag: int, buckets: int = 16) -> float:
    """Whether the bucket of one row tells anything of the bucket of the row `lag` later."""
    bucket = rows * buckets // len(rows)
    table = np.bincount(bucket[:-lag] * buckets + bucket[lag:], minlength=buckets**2)
    return chi_square(table, (len(rows) - lag) / buckets**2)


def places(rows: np.ndarray, buckets: int = 16) -> float:
    """Whether early positions hold rows of some part of the source more often."""
    n = len(rows)
    table = np.bincount(np.arange(n) * buckets // n * buckets + rows * buckets // n)
    return chi_square(np.pad(table, (0, buckets**2 - len(table))), n / buckets**2)


def all_statistics(rows: np.ndarray) -> dict[str, float]:
    root = int(len(rows) ** 0.5)
    found = {f"lag {lag}": lag_correlation(rows, lag) for lag in (1, 2, 3, 64, root, root + 1)}
    found |= {f"modulo {m}": low_bits(rows, m) for m in (2, 3, 4, 8, 16)}
    found |= {f"neighbours {lag}": neighbours(rows, lag) for lag in (1, 2, root)}
    return found | {"parity runs": parity_runs(rows), "places": places(rows)}


SIZES = [4096, 10_007, 2**16 + 1, 999 * 1000, 2**20]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_an_epoch_shows_no_pattern(n: int, seed: int) -> None:
    found = all_statistics(permute(np.arange(n), n, round_keys(seed, "web", 0)))
    assert {name: z for name, z in found.items() if abs(z) > 5} == {}


def test_the_statistics_reject_the_known_bad_shuffles() -> None:
    n, x = 2**16, np.arange(2**16)
    linear = (x * 40_503 + 12_345) % n  # as in levanter: low bits depend on low bits alone
    swapped_halves = (x % 256) * 256 + x // 256
    blocks = np.concatenate(
        [np.random.default_rng(b).permutation(256) + b * 256 for b in range(256)]
    )
    feistel = x.copy()  # two rounds whose function keeps the low bits
    for key in (3, 5):
        left, right = feistel // 256, feistel % 256
        feistel = right * 256 + (left + right * 2 * key) % 256
    for rows, caught_by in (
        (x, "lag 1"),
        (linear, "modulo 2"),
        (swapped_halves, "neighbours 1"),
        (blocks, "places"),
        (feistel, "modulo 16"),
    ):
        assert len(np.unique(rows)) == n
        assert abs(all_statistics(rows)[caught_by]) > 5


@pytest.mark.parametrize("n", SIZES)
def test_epochs_seeds_and_sources_are_independent_orders(n: int) -> None:
    keys = [(0, "web", 0), (0, "web", 1), (1, "web", 0), (0, "wed", 0), (2**62, "web", 0)]
    orders = [permute(np.arange(n), n, round_keys(*key)) for key in keys]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 12  # Poisson with mean 1
        x, y = one - one.mean(), other - other.mean()
        assert abs((x * y).sum() / (x * x).sum() * n**0.5) < 5
        table = np.bincount(one * 16 // n * 16 + other * 16 // n, minlength=256)
        assert abs(chi_square(table, n / 256)) < 5


def test_every_order_of_a_tiny_source_occurs_about_equally_often() -> None:
    keys = np.stack([round_keys(0, "web", epoch) for epoch in range(24_000)])
    orders = permute(np.arange(4)[None, :], 4, keys[:, None, :])
    codes = orders @ np.array([64, 16, 4, 1])
    assert len(np.unique(codes)) == 24
    first_rows = np.bincount(orders[:, 0], minlength=4)
    assert abs(chi_square(first_rows, 6000)) < 5
