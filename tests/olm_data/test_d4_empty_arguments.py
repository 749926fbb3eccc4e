"""AUDIT row D4: an empty word of a command line is an unset variable, never a default."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import inside
from support.tokenizing import texts, write_jsonl


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tokenize", "a.jsonl", "--tokenizer", "", "-o", "out"], '--tokenizer ""'),
        (["tokenize", "a.jsonl", "--tokenizer=", "-o", "out"], '--tokenizer=""'),
        (["tokenize", "", "--tokenizer", "gpt2", "-o", "out"], 'tokenize ""'),
        (["import", "", "--tokenizer", "gpt2", "-o", "out"], 'import ""'),
        (["mix", "m.yaml", "-o", ""], '-o ""'),
        (["verify", ""], 'verify ""'),
    ],
)
def test_d4_an_empty_argument_is_named_and_refused(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(3))
    monkeypatch.chdir(tmp_path)
    said = inside(capsys, *words)
    assert said.returncode == 2
    assert f"where: {named}\n" in said.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_d4_white_space_may_be_a_separator(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("one two")
    words = ["--tokenizer", tiny_tokenizer, "-o", tmp_path / "out", "--dry-run"]
    said = inside(capsys, "tokenize", tmp_path / "a.txt", "--separator", " ", *words)
    assert said.returncode == 0, said.stderr
