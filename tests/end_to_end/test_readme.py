"""What the README tells a reader to type works, in an empty folder, as typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.markdown import code_blocks


@pytest.fixture(scope="module")
def example(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's worked example has been run."""
    folder = tmp_path_factory.mktemp("readme")
    (script,) = code_blocks(repository / "README.md", "bash")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = dict(os.environ, PATH=path, PYTHONPATH=str(repository), OMP_NUM_THREADS="1")
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return folder


def test_worked_example_leaves_a_trained_run_and_a_report(example: Path) -> None:
    assert (example / "manifest.lock.json").is_file()
    assert (example / "runs/first/latest").exists()
    page = (example / "report.html").read_text()
    assert "<svg" in page
    assert "books" in page
    assert "http://" not in page.replace("http://www.w3.org", "")  # self-contained


def test_library_example_runs_in_the_same_folder(
    example: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example)
    (code,) = code_blocks(repository / "README.md", "python")
    names: dict[str, object] = {}
    exec(code, names)
    assert names["batch"].input_ids.shape == (8, 128)
