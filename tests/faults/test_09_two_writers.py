"""FAULTS row 9: two writers on one local output: one commits, the other is refused with exit 7."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.command import olm_data
from support.inline_runner import Around
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ConflictError
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store


def test_09_a_second_command_is_refused_while_the_first_one_works(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(40))
    second: list[subprocess.CompletedProcess[str]] = []
    words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", tmp_path / "out")
    meanwhile = Around(lambda: second.append(olm_data(*words)))
    made = make_dataset([source], tiny_tokenizer, tmp_path / "out", runner=meanwhile)
    assert second[0].returncode == 7
    assert "another process is writing" in second[0].stderr
    assert "--output" in second[0].stderr
    assert made.manifest.totals.documents == 40


def test_09_a_dead_writers_lease_does_not_stand_in_the_way(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(5))
    pid = os.fork()
    if pid == 0:
        with exclusive(Store(str(tmp_path / "out"))):
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "out" / ".lease-000001.json").exists()
    make_dataset([source], tiny_tokenizer, tmp_path / "out")
    assert not list((tmp_path / "out").glob(".lease-*"))


def test_09_a_manifest_that_appeared_meanwhile_is_never_replaced(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(5))
    # Another machine finishes first, past the lock of this one.
    store = Store(str(tmp_path / "out"))
    rival = Around(after=lambda: store.create("manifest.json", b"theirs"))
    with pytest.raises(ConflictError, match="already written"):
        make_dataset([source], tiny_tokenizer, tmp_path / "out", runner=rival)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == b"theirs"
