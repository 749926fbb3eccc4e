"""Scripts of benchmarks/: what they say and import; those of callbacks and steps at tiny sizes."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from support.forked import python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py"))


FILES = sorted(str(path.relative_to(BENCHMARKS)) for path in BENCHMARKS.rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_what_it_imports_from_the_packages_is_there(name: str) -> None:
    missing = []
    for node in ast.walk(ast.parse((BENCHMARKS / name).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("olm_"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if not hasattr(module, alias.name) and importlib.util.find_spec(inner) is None:
                    missing.append(inner)
    assert not missing


@pytest.mark.parametrize("folder", [".", "exports", "peers"])
def test_no_file_beside_a_program_hides_a_package_from_it(folder: str) -> None:
    """Python looks for imports in the program's own folder first."""
    names = {path.stem for path in (BENCHMARKS / folder).iterdir()}
    assert not names & {*packages_distributions(), *sys.stdlib_module_names}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_has_help(name: str) -> None:
    done = subprocess.run(
        [python(), str(BENCHMARKS / name), "--help"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_each_registered_callback_has_a_row_that_can_be_built(
    imported: Any, tiny_mixture: Path, tmp_path: Path
) -> None:
    bench = imported("bench_callbacks")
    args = argparse.Namespace(width=16, layers=1)
    rows = list(bench.cases())
    assert {name for _, name, _ in rows} == set(bench.registered())
    for _, name, options in rows:
        config = bench.configuration(args, tiny_mixture, str(tmp_path), name, options)
        built = {n for n, each in config.trainer.callbacks.build().items() if each.enabled}
        assert built - {"metrics_logger"} <= {name}


def test_a_row_compares_neighbours(imported: Any) -> None:
    bench = imported("bench_callbacks")
    steps = [(False, 1.0, 0.1, 0.2), (True, 2.0, 0.3, 0.5), (True, 2.0, 0.3, 0.5)]
    steps.append((False, 1.0, 0.1, 0.2))
    assert bench.row("x", steps) == "| x | 2 | 1000.0 ms | 2.000 | +200.00 ms | +300.00 ms |"


def test_each_contestant_is_measured_alone_and_a_missing_peer_is_a_line_and_an_error(
    imported: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = imported("bench_train_step")
    monkeypatch.setattr(bench, "GPU_SIZES", ("olm-1m",))
    monkeypatch.setattr(bench, "GPU_LENGTHS", (32,))
    missing = tmp_path / "python"
    options = ["--gpu-sizes", "--peers", "--peer-python", str(missing), "--rows", "1"]
    options += ["--rounds", "1", "--vocab-size", "128", "--mean-document", "8", "--json"]
    monkeypatch.setattr(sys, "argv", ["bench_train_step.py", *options])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 1
    *ours, peer = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["name"] for each in ours] == [
        "ours, documents masked",
        "ours, unmasked",
        "plain torch GPT, unmasked",
    ]
    assert all(each["tokens_per_second"] > 0 for each in ours)
    assert peer["name"] == "transformers Llama, unmasked"
    assert peer["failed"] == f"{missing}: No such file or directory"


def test_without_the_peer_that_was_asked_for_no_comparison_is_printed(
    imported: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = imported("bench_train_step")
    missing = tmp_path / "python"
    options = ["--preset", "olm-1m", "--peers", "--peer-python", str(missing), "--rows", "1"]
    options += ["--rounds", "1", "--vocab-size", "128", "--sequence-length", "32"]
    monkeypatch.setattr(sys, "argv", ["bench_train_step.py", *options])
    with pytest.raises(SystemExit, match=f"error: transformers Llama.*{missing}: No such file"):
        bench.main()
    assert not capsys.readouterr().out
