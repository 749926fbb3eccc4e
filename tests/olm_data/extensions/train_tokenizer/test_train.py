"""`olm-data train-tokenizer`: the same text gives the same file, and any text decodes back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command import Olm
from support.reading import resolve_source

from olm_data.cli import cli
from olm_data.errors import ConflictError, InputError, UsageError
from olm_data.extensions.train_tokenizer.train import train_tokenizer
from olm_data.tokenizer.tokenizer import PROBE_TEXTS, load_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    source = Path(pytest.__file__).read_text() + Path(json.__file__).read_text()
    path.write_text(
        "".join(json.dumps({"text": part}) + "\n" for part in source.split("\n\n")) + "oops\n"
    )
    return path


def test_the_tokenizer_has_the_size_asked_for_and_loses_nothing(text: Path, tmp_path: Path) -> None:
    done = train_tokenizer(resolve_source([str(text)]), tmp_path / "t.json", vocab_size=600)
    spec = load_tokenizer(tmp_path / "t.json")
    assert spec.sha256 == done.tokenizer.sha256
    assert (spec.vocab_size, spec.eos_token, spec.eos) == (600, "<|endoftext|>", 0)
    assert spec.lossless
    assert all(spec.decode(spec.encode(t)) == t for t in PROBE_TEXTS)
    assert len(spec.encode("def dumps(obj, skipkeys=False):")) < 25
    assert done.text.dropped == {"malformed": 1}
    assert done.text.first == {"malformed": f"a.jsonl, byte {text.stat().st_size - 5}"}
    assert done.text.documents == text.read_text().count("\n") - 1


def test_the_same_text_gives_the_same_file_in_any_process(text: Path, tmp_path: Path) -> None:
    train_tokenizer(resolve_source([str(text)]), tmp_path / "0.json", vocab_size=800)
    for seed in ("1", "2"):
        subprocess.run(
            [
                *(sys.executable, "-m", "olm_data.cli", "train-tokenizer", str(text)),
                *("--vocab-size", "800", "--output", str(tmp_path / f"{seed}.json")),
            ],
            env={
                "PYTHONHASHSEED": seed,
                "RAYON_NUM_THREADS": seed,
                "PYTHONPATH": ":".join(sys.path),
            },
            check=True,
            capture_output=True,
        )
    files = {path.read_bytes() for path in tmp_path.glob("*.json")}
    assert len(files) == 1


def test_another_file_is_replaced_only_if_asked(text: Path, tmp_path: Path) -> None:
    source, output = resolve_source([str(text)]), tmp_path / "t.json"
    for _ in range(2):  # the same again is nothing new
        train_tokenizer(source, output, vocab_size=300)
    before = output.read_bytes()
    with pytest.raises(ConflictError, match="another file is here"):
        train_tokenizer(source, output, vocab_size=301)
    assert output.read_bytes() == before
    train_tokenizer(source, output, vocab_size=301, overwrite=True)
    assert load_tokenizer(output).vocab_size == 301


def test_special_tokens_come_first_and_the_first_ends_documents(text: Path, tmp_path: Path) -> None:
    done = train_tokenizer(
        resolve_source([str(text)]),
        tmp_path / "t.json",
        vocab_size=400,
        special=["<stop>", "<pad>"],
    )
    assert dict(done.tokenizer.special_tokens) == {"<pad>": 1, "<stop>": 0}
    assert done.tokenizer.eos_token == "<stop>"


def test_a_line_longer_than_a_piece_is_learnt_from_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.extensions.train_tokenizer.train.PIECE", 50)
    (tmp_path / "a.txt").write_text("abcdefgh " * 40 + "\n" + "xy\n" * 40)
    done = train_tokenizer(resolve_source([str(tmp_path)]), tmp_path / "t.json", vocab_size=300)
    assert done.text.text_bytes == 40 * 9 + 1 + 40 * 3
    assert len(done.tokenizer.encode(" abcdefgh")) == 1


def test_what_cannot_be_trained_is_refused_and_writes_nothing(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.json"
    source = resolve_source([str(text)])
    for arguments in ({"vocab_size": 256}, {"vocab_size": 600, "special": []}):
        with pytest.raises(UsageError, match="too small"):
            train_tokenizer(source, output, **arguments)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(InputError, match="no text to learn from"):
        train_tokenizer(resolve_source([str(tmp_path / "empty.txt")]), output, vocab_size=600)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_a_vocabulary_has_a_largest_size(olm: Olm) -> None:
    said = olm("train-tokenizer", "a.txt", "--vocab-size", "9" * 20)
    assert (said.returncode, "Traceback" in said.stderr) == (2, False)


def test_the_command_prints_what_it_made_and_what_to_type_next(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.json"
    arguments = ["train-tokenizer", str(text), "--vocab-size", "600", "--output", str(output)]
    dry = CliRunner().invoke(cli, [*arguments, "--dry-run"])
    assert dry.exit_code == 0
    assert not output.exists()
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0
    assert "600 entries" in done.stdout
    assert "(1 record dropped)" in done.stdout
    assert (
        "warning: 1 record malformed (the record is damaged, or the line not a JSON object)"
        in done.stderr
    )
    assert "the first: a.jsonl, byte " in done.stderr
    other = [*arguments[:2], "--vocab-size", "601", "--output", str(output)]
    assert (
        CliRunner().invoke(cli, other).exit_code == 1
    )  # an OlmError, which `entry` gives its code
    assert CliRunner().invoke(cli, [*other, "--overwrite"]).exit_code == 0
    assert f"olm-data tokenize {text} --tokenizer {output}" in done.stderr
