"""bench_loader.py --peers, loaders as real processes; and the statistics of shuffle_quality.py."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def loaders(imported: Any) -> Any:
    """Importer of the modules under benchmarks/peers/loaders."""
    return lambda name: imported(f"peers.loaders.{name}")


@pytest.fixture(scope="module")
def options(loaders: Any, tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    """Options of a run over 16 rows."""
    parser = argparse.ArgumentParser()
    loaders("driver").add_options(parser)
    return argparse.Namespace(
        **vars(parser.parse_args(["--peer-envs", str(tmp_path_factory.mktemp("envs"))])),
        tokens=1024,
        sequence_length=64,
        batch=4,
        document=30,
        rounds=2,
    )


def test_loaders_run_as_processes_and_their_rows_are_proved_the_same(
    loaders: Any, options: argparse.Namespace, capfd: pytest.CaptureFixture[str]
) -> None:
    options.loaders = "gather-direct,gather-buffer,olm-labels"
    assert loaders("driver").run_peers(options) == 0
    table = {line.split()[0]: line for line in capfd.readouterr().out.splitlines()}
    assert "16 rows" in table["16"]
    for name in options.loaders.split(","):
        assert "the same" in table[name]


def test_a_loader_that_reads_other_rows_or_fails_is_named_and_ends_with_an_error(
    loaders: Any,
    options: argparse.Namespace,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_data = loaders("driver").make_data
    driver, Loader = loaders("driver"), loaders("base").Loader
    other = Loader(name="other", module="bare", option="direct", package="numpy", gives="")
    broken = Loader(name="broken", module="olm", option="nothing", package="olm-data", gives="")
    monkeypatch.setattr(driver, "LOADERS", (other, broken))
    monkeypatch.setattr(driver, "make_data", lambda *given: (0, make_data(*given)[1]))
    options.loaders = "other,broken"
    assert driver.run_peers(options) == 1
    lines = [line for line in capfd.readouterr().out.splitlines() if "FAILED" in line]
    assert "other" in lines[0]
    assert "other rows" in lines[0]
    assert "KeyError: 'nothing'" in lines[1]


@given(st.lists(st.lists(st.integers(0, 50_256), min_size=3, max_size=3), min_size=2), st.data())
def test_the_digest_of_rows_depends_on_every_row_and_not_on_their_order(
    loaders: Any, rows: list[list[int]], data: st.DataObject
) -> None:
    digest = loaders("base").digest_of_rows
    ids = np.array(rows)
    assert digest(np.array(data.draw(st.permutations(rows)))) == digest(ids)
    where = data.draw(st.integers(0, len(rows) - 1))
    changed = ids.copy()
    changed[where, 1] ^= 1
    assert digest(changed) != digest(ids)
    assert digest(ids[:-1]) != digest(ids)


@pytest.fixture(scope="module")
def shuffles(imported: Any) -> Any:
    """Importer of the modules under benchmarks/shuffles."""
    return lambda name: imported(f"shuffles.{name}")


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
