"""Each benchmark script says what it does, and finds what it imports from the packages."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

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
