"""What the README tells a reader to type works, in an empty folder, as typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.markdown import code_blocks

pytestmark = pytest.mark.xdist_group("readme")  # its fixtures are made once


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


def test_library_examples_run_in_the_same_folder(
    example: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example)
    reader, trainer, loop = code_blocks(repository / "README.md", "python")
    names: dict[str, Any] = {}
    exec(reader, names)
    assert names["batch"].input_ids.shape == (8, 128)
    exec(trainer, {})
    lines = (example / "runs/by-hand/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    names = {}
    exec(loop, names)
    assert names["state"]["rows_consumed"] == 5 * 512 // 128
