"""Bad input gets a message that says what, where and what to type next, and the right exit code.

Every row goes through the command line's own entry point: its output, exit code and what it leaves
on disk are what a user would see.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.command import inside

from olm_data.dataset.dataset import Dataset

GOOD = [{"id": f"d{i}", "text": f"document number {i} says something\n"} for i in range(40)]
MANIFEST = """version: 1
sequence_length: 16
packing: concat
sources:
  a: {data: ./a}
stages:
  - {name: main, tokens: 160, weights: {a: 1}}
"""


@dataclass(frozen=True)
class Shell:
    """Runs `olm-data` in this process, in a folder of its own."""

    folder: Path
    tokenizer: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Return (exit code, stdout, stderr)."""
        done = inside(self.capsys, *arguments)
        return done.returncode, done.stdout, done.stderr

    def tokenize(self, *arguments: str) -> tuple[int, str, str]:
        """Tokenise into `out` with the tiny tokenizer and one worker."""
        common = ("--tokenizer", str(self.tokenizer), "--output", "out", "--workers", "1")
        return self("tokenize", *arguments, *common)


@pytest.fixture
def shell(
    tmp_path: Path,
    tiny_tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, tiny_tokenizer, capsys)


def lines(records: list[object]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in records)


def truncated(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def parquet(folder: Path, name: str, column: str) -> None:
    pq.write_table(pa.table({column: [str(r["text"]) for r in GOOD]}), folder / name)


def bad_utf8(folder: Path, name: str) -> None:
    (folder / name).write_bytes(lines(GOOD) + b'{"text": "caf\xe9"}\n')


Prepare = Callable[[Path, str], None]
REFUSED: dict[str, tuple[str, Prepare, int, list[str]]] = {
    "empty input": ("a.jsonl", lambda f, n: (f / n).write_bytes(b""), 4, ["no document"]),
    "no text column in parquet": (
        "a.parquet",
        lambda f, n: parquet(f, n, "texte"),
        4,
        ["texte", "--text-column"],
    ),
    "malformed JSON line": (
        "a.jsonl",
        lambda f, n: (f / n).write_bytes(lines(GOOD) + b'{"text": oops}\n'),
        4,
        ["a.jsonl", "malformed", "--max-bad"],
    ),
    "truncated zstandard": (
        "a.jsonl.zst",
        lambda f, n: (f / n).write_bytes(
            truncated(zstandard.ZstdCompressor().compress(lines(GOOD)))
        ),
        4,
        ["a.jsonl.zst"],
    ),
    "not UTF-8": ("a.jsonl", bad_utf8, 4, ["a.jsonl", "utf8", "--max-bad"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_input_names_the_file_and_leaves_no_dataset(shell: Shell, case: str) -> None:
    name, prepare, expected, words = REFUSED[case]
    prepare(shell.folder, name)
    code, _, err = shell.tokenize(name)
    assert code == expected, err
    for word in words:
        assert word.lower() in err.lower(), err
    assert "Traceback" not in err
    assert "fix:" in err
    assert not (shell.folder / "out" / "manifest.json").exists()


def test_dropped_records_are_counted_by_reason_in_output_and_manifest(shell: Shell) -> None:
    bad = b'{"text": oops}\n{"text": ""}\n{"text": "  \\n"}\n{"other": 1}\n{"text": "caf\xe9"}\n'
    (shell.folder / "a.jsonl").write_bytes(lines(GOOD) + bad)
    code, out, err = shell.tokenize("a.jsonl", "--max-bad", "20%")
    assert code == 0, err
    manifest = json.loads((shell.folder / "out/manifest.json").read_text())
    assert manifest["dropped"] == {"empty": 2, "invalid_utf8": 1, "malformed": 1, "no_text": 1}
    assert manifest["totals"]["documents_in"] == len(GOOD) + 5
    for reason in manifest["dropped"]:
        assert reason.replace("_", " ") in out.replace("_", " ")


def edited_manifest(folder: Path) -> None:
    path = folder / "a" / "manifest.json"
    path.write_text(path.read_text().replace('"documents": 40', '"documents": 41'))


def truncated_shard(folder: Path) -> None:
    os.truncate(folder / "a" / "shard-00000.tokens.npy", 500)


def flipped_shard(folder: Path) -> None:
    path = folder / "a" / "shard-00000.tokens.npy"
    data = bytearray(path.read_bytes())
    data[300] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [edited_manifest, truncated_shard, flipped_shard])
def test_damage_is_found_by_verify_and_by_reading_rows(
    shell: Shell, damage: Callable[[Path], None]
) -> None:
    (shell.folder / "a.jsonl").write_bytes(lines(GOOD))
    common = ("--tokenizer", str(shell.tokenizer), "--workers", "1")
    assert shell("tokenize", "a.jsonl", "--output", "a", *common)[0] == 0
    (shell.folder / "m.yaml").write_text(MANIFEST)
    assert shell("mix", "m.yaml")[0] == 0
    damage(shell.folder)
    for command in (("verify", "a"), ("verify", "m.lock.json"), ("show", "row", "m.lock.json")):
        code, out, err = shell(*command)
        assert code == 3, (command, out, err)
        assert "manifest.json" in out + err or "shard-00000.tokens.npy" in out + err


def test_a_large_single_document_is_one_document(shell: Shell) -> None:
    words = b"the quick brown fox jumps over a lazy dog and 42 more; "
    (shell.folder / "a.txt").write_bytes(words * (4_000_000 // len(words)))
    code, _, err = shell.tokenize("a.txt", "--encoder", "hf")
    assert code == 0, err
    dataset = Dataset.open("out")
    assert dataset.documents == 1
    assert dataset.document(0).text_bytes == (4_000_000 // len(words)) * len(words)
