"""What is advised can be typed, and one thing given for another is named."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from support.command import Olm
from support.project import Project
from support.tokenizing import make_dataset, texts, write_jsonl


def advised(said: str, label: str) -> list[str]:
    """Return the words of the command that a message advises."""
    found = re.search(rf"{label}: (?:.*: )?olm-data (.*)", said)
    assert found, said
    return shlex.split(found[1])


def test_a_trained_tokenizer_is_used_by_the_command_that_is_printed(here: Path, olm: Olm) -> None:
    (here / "my texts").mkdir()
    write_jsonl(here / "my texts" / "a.jsonl", texts(20))
    words = ["--vocab-size", "300", "-o", "my tok.json", "--text-column", "text"]
    said = olm("train-tokenizer", "my texts", *words)
    assert said.returncode == 0, said.stderr
    said = olm(*advised(said.stderr, "next"), "--workers", "1", "--dry-run")
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("given", [".", "./", "../here", "./a b.jsonl"])
def test_text_given_for_a_dataset_is_made_one_by_the_command_that_is_printed(
    given: str, monkeypatch: pytest.MonkeyPatch, olm: Olm, project: Project
) -> None:
    here = project / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    write_jsonl(here / "a b.jsonl", texts(5))
    said = olm("show", "document", given)
    assert said.returncode == 4
    words = advised(said.stderr, "fix")
    words[words.index("FILE")] = str(project.tokenizer)
    said = olm(*words, "--workers", "1")
    assert said.returncode == 0, said.stderr


def test_links_to_nowhere_say_where_they_lead(here: Path, tiny_tokenizer: Path, olm: Olm) -> None:
    (here / "gone").symlink_to("nothing-there")
    (here / "loop").symlink_to("loop")
    for name, target in (("gone", "nothing-there"), ("loop", "loop")):
        said = olm("tokenize", name, "--tokenizer", tiny_tokenizer, "-o", "out")
        assert said.returncode == 4
        assert f"why: it leads to {target}\n" in said.stderr
        assert "did you mean" not in said.stderr


def test_a_dataset_is_known_by_its_manifest_and_is_no_import(
    here: Path, tiny_tokenizer: Path, olm: Olm
) -> None:
    make_dataset([write_jsonl(here / "a.jsonl", texts(5))], tiny_tokenizer, here / "ds")
    said = olm("status", "ds/manifest.json", "--json")
    assert (said.returncode, json.loads(said.stdout)["state"]) == (0, "complete")
    said = olm("import", "ds", "--tokenizer", tiny_tokenizer, "-o", "out")
    assert (said.returncode, "this is a dataset, not" in said.stderr) == (4, True)


def test_a_file_that_is_no_blend_is_refused(here: Path, olm: Olm) -> None:
    (here / "blend.txt").write_bytes(b"\x00\x93\xff 'quote without end")
    said = olm("import", "blend.txt", "--tokens", "1000")
    assert (said.returncode, "neither a mixture of OLMo-core" in said.stderr) == (2, True)
