"""FAULTS row 1: SIGKILL at any moment of tokenise; a rerun gives the bytes of a quiet run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.tokenizing import digests, texts, write_jsonl


def kill_loop(folder: Path, tokenizer: Path, repository: Path, *mode: str) -> list[list]:
    for k in range(2):
        write_jsonl(folder / f"{k}.jsonl", [*texts(12, 12 * k), "", b"bad"])
    script = repository / "tests" / "support" / "kill_loop.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(tokenizer), *mode],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{repository}:{repository / 'tests'}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_01_killed_at_every_disk_operation_a_rerun_gives_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path, repository: Path
) -> None:
    seen = kill_loop(tmp_path, tiny_tokenizer, repository, "every")
    assert [line for line in seen if line[1] is not None] == []
    kinds = {line[0].split(": ")[1].split(" ")[0] for line in seen}
    assert any("quarantine" in line[0] or ".jsonl.zst" in line[0] for line in seen)
    assert kinds >= {"open", "write", "half-written", "fsync", "replace", "link"}
    assert len(seen) > 80


def test_01_killed_at_random_times_a_rerun_gives_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path, repository: Path
) -> None:
    seen = kill_loop(tmp_path, tiny_tokenizer, repository, "random", "1", "10")
    assert [line for line in seen if line[1] is not None] == []
    assert len(seen) == 10


@pytest.mark.slow
def test_01_a_shuffled_selection_killed_at_random_times_ends_in_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path, repository: Path
) -> None:
    (tmp_path / "ids.txt").write_text("0-3\n1-7\n")
    options = {
        "exclude_ids": str(tmp_path / "ids.txt"),
        "where": "text != 'gone'",
        "sample": "4/5",
        "limit": 18,
        "shuffle_documents": True,
        "seed": 3,
    }
    seen = kill_loop(tmp_path, tiny_tokenizer, repository, "random", "2", "12", json.dumps(options))
    assert [line for line in seen if line[1] is not None] == []
    assert len(seen) == 12


@pytest.mark.slow
def test_01_the_command_itself_killed_again_and_again_ends_in_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path, repository: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(400))

    def command(output: str) -> list[str]:
        return [
            *(sys.executable, "-m", "olm_data.cli", "tokenize", str(source)),
            *("--tokenizer", str(tiny_tokenizer), "--output", str(tmp_path / output)),
            *("--shard-tokens", "1000", "--holdout", "0.1", "--workers", "2"),
        ]

    environment = os.environ | {"PYTHONPATH": str(repository)}
    subprocess.run(command("whole"), env=environment, check=True, capture_output=True)
    moments = random.Random(1)
    killed = 0
    for _ in range(4):
        process = subprocess.Popen(
            command("out"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(moments.uniform(0.3, 1.2))
        except subprocess.TimeoutExpired:
            process.kill()
            killed += 1
        process.wait()
    last = subprocess.run(
        command("out"), env=environment, check=False, capture_output=True, text=True
    )
    assert last.returncode == 0, last.stderr
    assert killed > 0
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.slow
def test_01_an_addition_with_dedup_killed_at_disk_operations_leaves_the_old_or_the_new_version(
    tiny_tokenizer: Path, tmp_path: Path, repository: Path
) -> None:
    seen = kill_loop(tmp_path, tiny_tokenizer, repository, "add", "7", '{"dedup": "exact"}')
    assert [line for line in seen if line[1] is not None] == []
    assert len(seen) > 15
