"""A file that is no text of its name is called what it is; what is one document is said."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest
import zstandard
from support.command import inside

from olm_data.sources.listing import list_files
from olm_data.sources.txt import notes

LINES = "".join(f'{{"text": "hello {n}, \u00e9"}}\n' for n in range(30))
ROWS = "text,id\n" + "".join(f"hello {n},{n}\n" for n in range(30))
WRITTEN = {
    "gzip": (lambda data: gzip.compress(data.encode()), ".gz"),
    "zstd": (lambda data: zstandard.compress(data.encode()), ".zst"),
    "xz": (lambda data: lzma.compress(data.encode()), ".xz"),
    "bzip2": (lambda data: bz2.compress(data.encode()), ".bz2"),
    "UTF-16": (lambda data: data.encode("utf-16"), "-f UTF-16 "),
    "UTF-16, little-endian": (lambda data: data.encode("utf-16-le"), "-f UTF-16LE "),
    "UTF-16, big-endian": (lambda data: data.encode("utf-16-be"), "-f UTF-16BE "),
    "UTF-32": (lambda data: data.encode("utf-32"), "-f UTF-32 "),
    "UTF-32, little-endian": (lambda data: data.encode("utf-32-le"), "-f UTF-32LE "),
    "UTF-32, big-endian": (lambda data: data.encode("utf-32-be"), "-f UTF-32BE "),
}


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_what_a_file_is_instead_of_text_is_said_with_what_to_do(
    kind: str, name: str, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, fix = WRITTEN[kind]
    (tmp_path / name).write_bytes(write(ROWS if name == "a.csv" else LINES))
    words = ("tokenize", tmp_path / name, "--tokenizer", tiny_tokenizer, "--dry-run")
    said = inside(capsys, *words, "-o", tmp_path / "out")
    assert said.returncode == 4, said.stderr
    assert kind.partition(",")[0] in said.stderr
    assert fix in said.stderr


def test_a_header_of_another_encoding_is_refused_without_a_traceback(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_bytes("text,Gr\u00f6\u00dfe\na,1\n".encode("cp1252"))
    said = inside(
        capsys, "tokenize", tmp_path / "a.csv", "--tokenizer", tiny_tokenizer, "-o", tmp_path / "o"
    )
    assert (said.returncode, "header is not UTF-8" in said.stderr) == (4, True)


def test_text_files_that_are_one_document_against_all_likelihood_are_said(tmp_path: Path) -> None:
    for name, text in (("lines", "a line\n" * 5_000), ("short", "a\nb"), ("parted", "a@@b\n" * 9)):
        (tmp_path / f"{name}.txt").write_text(text)
    files = list_files([str(tmp_path)]).files
    (one,) = notes(files, None)
    assert "lines.txt is one document, and has 5,000 lines or more" in one
    assert [said.partition(":")[0] for said in notes(files, "@@")] == ["lines.txt", "short.txt"]
    assert len(notes(files, "blank-lines")) == 3
    assert notes(files * 9, None) == []
