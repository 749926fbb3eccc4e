"""What the page on selecting documents tells a reader to type works, and says what it left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import olm_data
from support.markdown import code_blocks

PAGE = "docs/how-to/select-documents.md"


@pytest.fixture(scope="module")
def example(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which the page's blocks have been run, and what they printed."""
    folder = tmp_path_factory.mktemp("select")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = f'olm-data() {{ "{sys.executable}" -m olm_data.cli "$@"; }}\n'
    script = command + "".join(code_blocks(repository / PAGE, "bash"))
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=dict(os.environ, PATH=path, PYTHONPATH=str(repository), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return folder, run.stdout


def test_each_selection_takes_what_the_page_says(example: tuple[Path, str]) -> None:
    folder, said = example
    rows = [json.loads(line) for line in (folder / "web.jsonl").read_text().splitlines()]
    totals = {
        name: json.loads((folder / name / "manifest.json").read_text())
        for name in ("good", "clean", "tenth", "first", "mixed")
    }
    good = sum(row["score"] >= 3 and row["language"] is not None for row in rows)
    documents = {name: manifest["totals"]["documents"] for name, manifest in totals.items()}
    assert 100 < documents.pop("tenth") < 300
    assert documents == {"good": good, "clean": 1997, "first": 500, "mixed": 2000}
    assert totals["good"]["dropped"] == {"filtered": 2000 - good}
    assert "3 of 3 ids met" in said
    assert "would write both" in said
    assert not (folder / "both").exists()


def test_options_that_do_not_go_together_are_usage_errors(example: tuple[Path, str]) -> None:
    folder, _ = example
    command = ("tokenize", "web.jsonl", "--tokenizer", "tokenizer.json", "--output", "out")
    for more, message in (
        (("--seed", "3"), "no effect without --sample or --shuffle-documents"),
        (("--where", "score = 3"), "not an expression over columns"),
    ):
        done = olm_data(*command, *more, folder=folder)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
    assert not (folder / "out").exists()
