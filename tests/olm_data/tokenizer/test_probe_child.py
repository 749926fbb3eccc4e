"""The texts that a tokenizer file is tried with, and what a trial of it answers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from olm_data.tokenizer.probe import CHILD
from olm_data.tokenizer.probe_child import REFUSED, RUN, texts


def tried(data: bytes, seconds: int = 20) -> subprocess.CompletedProcess[bytes]:
    found = find_spec("tokenizers")
    assert found.origin is not None
    packages = str(Path(found.origin).parents[1])
    arguments = [sys.executable, "-I", str(CHILD), str(seconds), str(4 << 30), packages]
    return subprocess.run(arguments, input=data, capture_output=True)


def test_texts_are_runs_of_common_characters_and_of_the_files_own() -> None:
    found = texts(
        json.dumps({"pre_tokenizer": {"Regex": "\u0436+"}, "model": {"\u0416": 1}}).encode()
    )
    assert "\u0436" * RUN in found
    assert "\u0436" * RUN + "b" in found
    assert not any("\u0416" in text for text in found)  # of the vocabulary, no rule
    assert "a" * RUN + "!" in found


def test_a_good_file_is_answered_with_zero_and_no_word(tiny_tokenizer: Path) -> None:
    done = tried(tiny_tokenizer.read_bytes())
    assert (done.returncode, done.stdout) == (0, b"")


def test_what_is_no_tokenizer_is_left_to_the_parent() -> None:
    assert tried(b"{}").returncode == 0


@pytest.mark.slow
def test_a_file_that_multiplies_text_is_refused(tiny_tokenizer: Path) -> None:
    value = json.loads(tiny_tokenizer.read_bytes())
    value["normalizer"] = {
        "type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10_000,
    }  # fmt: skip
    done = tried(json.dumps(value).encode())
    assert done.returncode == REFUSED
    assert b"more than a hundred times as long" in done.stdout
