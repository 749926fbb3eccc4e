"""benchmarks/bench_callbacks.py has a row of each registered callback, and counts pairs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/bench_callbacks.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_callbacks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_each_registered_callback_has_a_row_that_can_be_built(
    bench: ModuleType, tiny_mixture: Path, tmp_path: Path
) -> None:
    args = argparse.Namespace(width=16, layers=1)
    rows = list(bench.cases())
    assert {name for _, name, _ in rows} == set(bench.registered())
    for _, name, options in rows:
        config = bench.configuration(args, tiny_mixture, str(tmp_path), name, options)
        built = {n for n, each in config.trainer.callbacks.build().items() if each.enabled}
        assert built - {"metrics_logger"} <= {name}


def test_a_row_compares_neighbours(bench: ModuleType) -> None:
    steps = [(False, 1.0, 0.1, 0.2), (True, 2.0, 0.3, 0.5), (True, 2.0, 0.3, 0.5)]
    steps.append((False, 1.0, 0.1, 0.2))
    assert bench.row("x", steps) == "| x | 2 | 1000.0 ms | 2.000 | +200.00 ms | +300.00 ms |"
