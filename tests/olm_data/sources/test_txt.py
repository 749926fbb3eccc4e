"""Text files: one document a file, or split; nothing between separators is lost."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reading import read_source

from olm_data.sources import txt


def test_a_file_is_one_document_with_its_path_as_id(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    (tmp_path / "sub" / "b.md").write_bytes("h\u00e9".encode())
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    read = read_source(tmp_path)
    assert read.texts == ["one\r\n\r\ntwo\n", "h\u00e9", "packed"]
    assert read.ids == ["a.txt", "sub/b.md", "sub/c.txt.gz"]
    assert read.batches == 1


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
    assert read.texts == ["one", "two", "three"]
    assert read.reasons == [("empty", 16)]


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
