"""What the page on finding a step's documents tells a reader to type works, and answers."""

from __future__ import annotations

from pathlib import Path

from support.markdown import run_blocks

PAGE = "docs/how-to/find-what-was-in-a-step.md"


def test_the_page_works_as_typed_and_its_answers_agree(repository: Path, tmp_path: Path) -> None:
    said = run_blocks(repository / PAGE, tmp_path)
    assert "step 13 of 31, trained: 8 rows, 512 tokens" in said
    assert "stage main, source web: 6 rows" in said
    assert said.count("rank 1, micro-batch 0") == 4
    assert said.count("address web:17") == 2
    assert "the log agrees with the lock: steps 1 to 15, rows 0 to 120" in said
    assert "to come" in said.split("address web:17")[-1]
