"""FAULTS row 1: SIGKILL at any moment of tokenise; a rerun gives the bytes of a quiet run."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest
from support.command import REPOSITORY, arguments, environment, olm_data, program
from support.tokenizing import digests, texts, write_jsonl


def kill_loop(folder: Path, tokenizer: Path, *mode: str) -> list[list]:
    """What came of each kill: the operation, and the files that differ after the rerun: None."""
    for k in range(2):
        write_jsonl(folder / f"{k}.jsonl", [*texts(12, 12 * k), "", b"bad"])
    done = program(REPOSITORY / "tests" / "support" / "kill_loop.py", folder, tokenizer, *mode)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in seen if line[1] is not None] == []
    return seen


@pytest.mark.slow
def test_01_killed_at_every_disk_operation_a_rerun_gives_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    seen = kill_loop(tmp_path, tiny_tokenizer, "every")
    kinds = {line[0].split(": ")[1].split(" ")[0] for line in seen}
    assert any("quarantine" in line[0] or ".jsonl.zst" in line[0] for line in seen)
    assert kinds >= {"open", "write", "half-written", "fsync", "replace", "link"}
    assert len(seen) > 80


def test_01_killed_at_random_times_a_rerun_gives_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    seen = kill_loop(tmp_path, tiny_tokenizer, "random", "1", "10")
    assert len(seen) == 10


@pytest.mark.slow
def test_01_a_shuffled_selection_killed_at_random_times_ends_in_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path
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
    seen = kill_loop(tmp_path, tiny_tokenizer, "random", "2", "12", json.dumps(options))
    assert len(seen) == 12


@pytest.mark.slow
def test_01_the_command_itself_killed_again_and_again_ends_in_identical_bytes(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(400))

    def command(output: str) -> tuple[str | Path, ...]:
        words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", tmp_path / output)
        return (*words, "--shard-tokens", "1000", "--holdout", "0.1", "--workers", "2")

    assert olm_data(*command("whole")).returncode == 0
    moments = random.Random(1)
    killed = 0
    for _ in range(4):
        process = subprocess.Popen(
            arguments(*command("out")),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(moments.uniform(0.3, 1.2))
        except subprocess.TimeoutExpired:
            process.kill()
            killed += 1
        process.wait()
    last = olm_data(*command("out"))
    assert last.returncode == 0, last.stderr
    assert killed > 0
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.slow
def test_01_an_addition_with_dedup_killed_at_disk_operations_leaves_the_old_or_the_new_version(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    seen = kill_loop(tmp_path, tiny_tokenizer, "add", "7", '{"dedup": "exact"}')
    assert len(seen) > 15
