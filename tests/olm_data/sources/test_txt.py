"""Text files: one document a file, or split; nothing between separators is lost."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import Olm
from support.reading import read_source

from olm_data.sources import txt
from olm_data.sources.listing import list_files
from olm_data.sources.txt import notes


def test_a_file_is_one_document_with_its_path_as_id(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    (tmp_path / "sub" / "b.md").write_bytes("h\u00e9".encode())
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    read = read_source(tmp_path)
    assert read.texts == ["one\r\n\r\ntwo\n", "h\u00e9", "packed"]
    assert (read.ids, read.batches) == (["a.txt", "sub/b.md", "sub/c.txt.gz"], 1)


def test_blank_lines_split_a_file_into_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n \n one\nline two\r\n\r\n\r\ntwo\n  \t\n\nthree\n")
    read = read_source(path, separator="blank-lines")
    assert read.texts == [" one\nline two", "two", "three"]
    data = path.read_bytes()
    for (_, place), text in zip(read.places, read.texts, strict=True):
        assert data[place:].startswith(text.encode())


def test_a_separator_splits_a_file_and_empty_pieces_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one<sep>two<sep><sep>three<sep>")
    read = read_source(path, separator="<sep>")
    assert (read.texts, read.reasons) == (["one", "two", "three"], [("empty", 16)])


@settings(max_examples=80)
@given(
    st.lists(
        st.sampled_from(["a", "bc", " ", "\n", "\r\n", "\t", "<s>", "<", "\u00e9"]), max_size=40
    )
)
def test_splitting_in_small_reads_equals_splitting_the_whole(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("txt") / "a.txt"
    path.write_bytes("".join(parts).encode())
    for separator in ("<s>", "blank-lines"):
        whole = read_source(path, separator=separator)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(txt, "_CHUNK", 3)
            small = read_source(path, separator=separator)
        assert (small.texts, small.places) == (whole.texts, whole.places)
        if separator == "<s>":
            pieces = "".join(parts).split("<s>")
            assert whole.texts == [piece for piece in pieces if piece and not piece.isspace()]
        else:
            joined = "".join(whole.texts)
            assert re.sub(r"\s", "", joined) == re.sub(r"\s", "", "".join(parts))


# A file that is no text of its name is called what it is; what is one document is said.
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
    kind: str, name: str, tiny_tokenizer: Path, tmp_path: Path, olm: Olm
) -> None:
    write, fix = WRITTEN[kind]
    (tmp_path / name).write_bytes(write(ROWS if name == "a.csv" else LINES))
    words = ("tokenize", tmp_path / name, "--tokenizer", tiny_tokenizer, "--dry-run")
    said = olm(*words, "-o", tmp_path / "out")
    assert said.returncode == 4, said.stderr
    assert kind.partition(",")[0] in said.stderr
    assert fix in said.stderr


def test_a_header_of_another_encoding_is_refused_without_a_traceback(
    tiny_tokenizer: Path, tmp_path: Path, olm: Olm
) -> None:
    (tmp_path / "a.csv").write_bytes("text,Gr\u00f6\u00dfe\na,1\n".encode("cp1252"))
    said = olm("tokenize", tmp_path / "a.csv", "--tokenizer", tiny_tokenizer, "-o", tmp_path / "o")
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
