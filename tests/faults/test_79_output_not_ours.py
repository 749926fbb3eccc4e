"""FAULTS row 79: an output that is not ours. Details: tests/olm_data/storage/."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.tokenizing import digests, texts, write_jsonl

from olm_data.cli import cli
from olm_data.errors import UsageError


@pytest.mark.parametrize("place", ["", "/", "~", ".", "own"])
def test_79_nothing_is_written_changed_or_deleted(
    place: str, tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "own").mkdir(parents=True)
    (home / "own" / "thesis.tex").write_text("mine")
    text = write_jsonl(tmp_path / "a.jsonl", texts(5))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    before, root = digests(home), sorted(os.listdir("/"))
    output = os.path.expanduser(place)
    words = ["tokenize", str(text), "--tokenizer", str(tiny_tokenizer), "--encoder", "hf"]
    refused = CliRunner().invoke(cli, [*words, "--workers", "1", "--output", output])
    assert isinstance(refused.exception, UsageError), refused.output
    assert (digests(home), sorted(os.listdir("/"))) == (before, root)
