"""`bench_loader.py --peers`: loaders as real processes, and the check that they read the same."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def loaders(repository: Path) -> Any:
    """Importer of the modules under benchmarks/peers/loaders."""
    sys.path.insert(0, str(repository / "benchmarks"))
    yield lambda name: importlib.import_module(f"peers.loaders.{name}")
    sys.path.remove(str(repository / "benchmarks"))


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
