"""Rows S4 to S8: every kind of file the product writes, made false, for each command reading it.

No traceback, no exit code 1, nothing executed, no escape on the terminal, no hang, bounded memory.
`OLM_WALK_SEED` and `OLM_WALK_CASES` choose other and more cases.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from support.every_file import Workplace, faults

SEED = int(os.environ.get("OLM_WALK_SEED", "20260101"))
CASES = int(os.environ.get("OLM_WALK_CASES", "200"))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Workplace:
    torch.set_num_threads(1)  # the children are forked
    return Workplace.make(tmp_path_factory.mktemp("walk") / "honest", tiny_tokenizer)


def walk(honest: Workplace, seed: int, cases: int, work: Path) -> None:
    found, usual = [], {}
    for what, place, command in honest.cases(seed, cases, work):
        if command not in usual:
            same = shutil.copytree(honest.folder, work / "same")
            usual[command] = command.run(same)
            assert usual[command].code == 0, usual[command].output
            shutil.rmtree(same)
        outcome = command.run(place)
        wrong = faults(place, outcome, usual[command])
        if wrong:
            words = " ".join(command.words)
            found.append(f"{wrong} {what} | {command.module} {words}\n{outcome.output[-2000:]}")
        shutil.rmtree(place)
    assert not found, f"seed {seed}:\n" + "\n\n".join(found)


def test_s8_no_false_file_makes_a_command_fail_in_an_unknown_way(
    honest: Workplace, tmp_path: Path
) -> None:
    walk(honest, SEED, 5, tmp_path)


@pytest.mark.slow
def test_s8_the_same_with_many_files(honest: Workplace, tmp_path: Path) -> None:
    walk(honest, SEED + 1, CASES, tmp_path)


def test_s8_every_kind_of_file_is_read_by_some_command(honest: Workplace) -> None:
    unread = [name for name in honest.kinds() if not honest.readers(name)]
    assert unread == []
