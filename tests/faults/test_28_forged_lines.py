"""FAULTS row 28: names and ids from outside cannot act on the terminal or forge a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import inside
from support.tokenizing import texts

FORGED = "a\x1b[2K\r\nerror: all is lost\x9b31m\u202e.jsonl"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file whose name and ids hold escapes, line breaks and a direction mark."""
    path = tmp_path / FORGED
    lines = [
        {"id": f"{n}\x1b]0;owned\x07\nmade 9 tokens", "text": t} for n, t in enumerate(texts(9))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_28_every_command_escapes_what_comes_from_names_and_ids(
    source: Path, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out\x1b[31m\nmade 7 tokens"
    common = (source, "--tokenizer", tiny_tokenizer, "--encoder", "hf", "--output", output)
    broken = tmp_path / ("b" + FORGED)
    broken.write_text("{\n" * 50)
    assert inside(capsys, "tokenize", *common[:-1], tmp_path / "named").returncode == 0
    (tmp_path / "named").rename(output)  # what no command would make
    runs = [
        inside(capsys, "tokenize", *common, "--dry-run"),
        inside(capsys, "tokenize", *common, "--workers", "1"),
        inside(capsys, "tokenize", *common, "--workers", "1", "--eos", "none"),  # another plan
        inside(capsys, "tokenize", broken, *common, "--dry-run", "--text-column", "a\x1b[31m\nb"),
        inside(capsys, "verify", output),
        inside(capsys, "show", "document", output, "0"),
        inside(capsys, "doctor", output, "--clean", "--older-than", "0s", "--dry-run"),
        inside(capsys, "tokenize", tmp_path / ("absent" + FORGED), *common[1:]),
        inside(capsys, "--debug", "verify", tmp_path / ("absent" + FORGED)),
    ]
    assert [run.returncode for run in runs[:3]] == [2, 2, 2], [run.stderr for run in runs]
    for run in runs:
        said = run.stdout + run.stderr
        assert not {"\x1b", "\x9b", "\u202e", "\x07", "\r"} & set(said), said
        assert not any(
            line.startswith(("error: all is lost", "made 7", "made 9")) for line in said.split("\n")
        ), said


def test_28_a_bad_record_of_such_a_file_is_named_on_one_line(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / FORGED
    source.write_text('{"text": "x"}\n' + "{\n" * 50)
    refused = inside(
        capsys,
        *("tokenize", source, "--tokenizer", tiny_tokenizer, "--encoder", "hf"),
        *("--workers", "1", "--output", tmp_path / "out"),
    )
    assert refused.returncode == 4
    assert "\x1b" not in refused.stderr
    assert not any(line.startswith("error: all") for line in refused.stderr.split("\n"))
