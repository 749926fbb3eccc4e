"""The statistics of `shuffle_quality.py`: sound for random orders, blind to no bad one."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def shuffles(repository: Path) -> Any:
    """Importer of the modules under benchmarks/shuffles."""
    sys.path.insert(0, str(repository / "benchmarks"))
    yield lambda name: importlib.import_module(f"shuffles.{name}")
    sys.path.remove(str(repository / "benchmarks"))


N, KEYS = 10_007, 40


def all_ps(quality: Any, orders: list[np.ndarray], n: int) -> dict[str, list[float]]:
    """p-values of each statistic over all orders, and of each pair of neighbours."""
    found = {
        name: [statistic(order, n) for order in orders]
        for name, statistic in quality.STATISTICS.items()
    }
    pairs = itertools.pairwise(orders)
    found["each other"] = [quality.against_each_other(one, other, n) for one, other in pairs]
    return found


def test_windows_of_permutations_beyond_any_table_look_random(shuffles: Any) -> None:
    quality, n = shuffles("quality"), 10**12
    orders = [shuffles("orders").prp1(n, seed, N) for seed in range(KEYS)]
    found = all_ps(quality, orders, n) | {"values": [quality.values(o, n) for o in orders]}
    for ps in found.values():
        assert quality.uniform_p(ps) > 1e-4


@pytest.mark.parametrize(
    ("name", "caught_by"),
    [
        ("affine (control)", {"places", "lags", "pairs", "low bits", "bit pairs", "batches"}),
        ("buffer of 1,000", {"places", "lags", "pairs", "batches", "each other"}),
    ],
)
def test_bad_shuffles_are_caught(
    shuffles: Any, tmp_path: Path, name: str, caught_by: set[str]
) -> None:
    quality = shuffles("quality")
    orders = shuffles("orders").shuffles(tmp_path)[name](N, range(12), N)
    assert all(np.array_equal(np.sort(order), np.arange(N)) for order in orders)
    found = all_ps(quality, orders, N)
    assert {test for test, ps in found.items() if quality.uniform_p(ps) < 1e-4} >= caught_by


def test_values_crowded_into_a_part_of_the_range_are_caught(shuffles: Any) -> None:
    order = np.random.default_rng(0).integers(0, 10**12 // 2, N)
    assert shuffles("quality").values(order, 10**12) < 1e-9


@settings(max_examples=25)
@given(n=st.integers(1, 300), seed=st.integers(0, 1000))
def test_swap_or_not_is_a_permutation(shuffles: Any, n: int, seed: int) -> None:
    order = shuffles("orders").swap_or_not(n, seed, n)
    assert np.array_equal(np.sort(order), np.arange(n))


def test_p_values_of_known_statistics_are_the_published_ones(shuffles: Any) -> None:
    quality = shuffles("quality")
    assert quality.normal_p(1.959964) == pytest.approx(0.05, abs=1e-6)
    # 2.5 % points of chi-square tables, so 5 % on both sides
    for statistic, freedom in ((74.222, 100), (129.561, 100), (32.357, 50), (71.420, 50)):
        assert quality.chi_square_p(statistic, freedom) == pytest.approx(0.05, abs=0.001)
    assert quality.uniform_p(np.linspace(0.005, 0.995, 100)) > 0.99
    assert quality.uniform_p(np.linspace(0, 0.5, 100)) < 1e-9
