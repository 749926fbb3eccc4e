"""Rows S4 to S8: every kind of file the product writes, made false, for each command reading it.

No traceback, no exit code 1, nothing executed, no escape on the terminal, no hang, bounded memory.
`OLM_WALK_SEED` and `OLM_WALK_CASES` choose other and more cases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import WITH_TESTS, environment
from support.every_file import Workplace

pytestmark = pytest.mark.slow  # in a quick run: FAULTS rows 64, 69, 70 and 72, file by file
SEED = int(os.environ.get("OLM_WALK_SEED", "20260101"))
CASES = int(os.environ.get("OLM_WALK_CASES", "200"))
PROGRAM = "import sys; from support.every_file import main; main(*sys.argv[1:])"


def program(*words: object) -> list[str]:
    """Run the walk as a program; return its lines."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        env=environment(WITH_TESTS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Workplace:
    folder = tmp_path_factory.mktemp("walk") / "honest"
    program("make", folder, tiny_tokenizer)
    return Workplace(folder)


def walk(honest: Workplace, seed: int, cases: int, work: Path) -> None:
    found = [json.loads(line) for line in program("walk", honest.folder, work, seed, cases)]
    assert not found, f"seed {seed}:\n" + "\n\n".join(found)


def test_s8_no_false_file_makes_a_command_fail_in_an_unknown_way(
    honest: Workplace, tmp_path: Path
) -> None:
    walk(honest, SEED, CASES, tmp_path)


def test_s8_every_kind_of_file_is_read_by_some_command(honest: Workplace) -> None:
    unread = [name for name in honest.kinds() if not honest.readers(name)]
    assert unread == []
