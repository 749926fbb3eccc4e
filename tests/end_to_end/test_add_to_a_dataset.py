"""The how-to page on additions works as typed, and says what happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.markdown import code_blocks


def test_the_page_adds_drops_what_was_there_and_opens_both_versions(
    repository: Path, tmp_path: Path
) -> None:
    page = repository / "docs" / "how-to" / "add-to-a-dataset.md"
    (script,), (reader,) = code_blocks(page, "bash"), code_blocks(page, "python")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = dict(os.environ, PATH=path, PYTHONPATH=str(repository), OMP_NUM_THREADS="1")

    def run(*words: str) -> str:
        ran = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        return ran.stdout + ran.stderr

    said = run("bash", "-euo", "pipefail", "-c", script)
    assert "51 of 301 records: duplicate" in said
    assert "recorded as tuesday/stories.jsonl" in said
    assert "verified tokens" in said
    first, newest = map(int, run(sys.executable, "-c", reader).split())
    assert 150 < first < newest < 250
