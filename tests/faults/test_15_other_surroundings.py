"""FAULTS row 15: locale, time zone, hash seed, workers and listing order change no byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tokenizing import digests, texts, write_jsonl

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
