"""FAULTS rows 14 and 15: clock, locale, time zone, hash seed and listing order change no byte."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


SURROUNDINGS = [
    ({"LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "0"}, "1"),
    ({"LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "123"}, "2"),
    ({"LC_ALL": "POSIX", "TZ": "America/St_Johns", "LANG": "de_DE"}, "3"),
]


@pytest.mark.slow
def test_15_the_same_bytes_whatever_the_surroundings(
    tiny_tokenizer: Path, tmp_path: Path, repository: Path
) -> None:
    seen = []
    for number, (variables, workers) in enumerate(SURROUNDINGS):
        folder = tmp_path / str(number)
        (folder / "in").mkdir(parents=True)
        parts = [2, 0, 1] if number else [0, 1, 2]  # created, and so listed, in another order
        for part in parts:
            write_jsonl(folder / "in" / f"\u00fc-{part}.jsonl", texts(30, 30 * part))
        command = [
            *(sys.executable, "-m", "olm_data.cli", "tokenize", str(folder / "in")),
            *("--tokenizer", str(tiny_tokenizer), "--output", str(folder / "out")),
            *("--shard-tokens", "700", "--holdout", "0.2", "--workers", workers),
        ]
        environment = os.environ | {"PYTHONPATH": str(repository)} | variables
        subprocess.run(command, env=environment, check=True, capture_output=True)
        found = digests(folder / "out")
        del found["job.json"]  # says where the inputs are read
        del found["plan.json"]  # holds the inputs' modification times, for reruns only
        seen.append(found)
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 20
