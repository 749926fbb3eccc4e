"""FAULTS row 14: the wall clock may jump by a day or a year; nothing that is made depends on it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.command import arguments, environment
from support.tokenizing import digests, texts, write_jsonl

JUMPING = """
import time
_real, _calls = time.time, iter(range(1 << 60))
def _jumping():
    # forward a year, then back a day, with every look at the clock
    return _real() + (365 * 86400 if next(_calls) % 2 else -86400)
time.time = _jumping
"""


def tokenized(folder: Path, source: Path, tokenizer: Path, patch: str = "") -> str:
    command = ("tokenize", source, "--tokenizer", tokenizer, "--encoder", "hf", "--workers", "2")
    options = ("--shard-tokens", "700", "--holdout", "0.2", "--output", folder)
    env = environment()
    env["PYTHONPATH"] = f"{patch}:{env['PYTHONPATH']}"
    done = subprocess.run(
        arguments(*command, *options), env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(60))


@pytest.mark.slow
def test_14_a_jumping_clock_changes_no_byte_and_no_duration(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(JUMPING)  # in the command and in each worker
    tokenized(tmp_path / "right", source, tiny_tokenizer)
    said = tokenized(tmp_path / "jumping", source, tiny_tokenizer, str(patch))
    assert digests(tmp_path / "jumping") == digests(tmp_path / "right")
    (took,) = re.findall(r"^seconds +(\S+) s$", said, re.MULTILINE)
    assert 0 <= float(took) < 3600  # not a day, not a year
