"""Row 17: text that is not UTF-8 is dropped, counted and named by file and place."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reading import read_source

# Stray continuation, overlong forms, surrogates, beyond Unicode, cut characters, Latin-1, UTF-16.
BAD = [
    b"\x80",
    b"a\xbfb",
    b"\xc0\xaf",
    b"\xe0\x80\xaf",
    b"\xf0\x80\x80\xaf",
    b"\xed\xa0\x80",
    b"\xed\xb0\x80\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xf8\x88\x80\x80\x80",
    b"\xff",
    b"cut \xe2\x82",
    "Latin-1: \u00e9".encode("latin-1"),
    "UTF-16".encode("utf-16"),
]


def as_jsonl(path: Path, texts: list[bytes]) -> None:
    path.write_bytes(b"".join(b'{"text": "%b"}\n' % t for t in texts))


def as_parquet(path: Path, texts: list[bytes]) -> None:
    pq.write_table(pa.table({"text": pa.array(texts, pa.binary())}), path)


def as_parquet_strings(path: Path, texts: list[bytes]) -> None:
    # A file that claims to hold UTF-8: built from the buffers, as no writer would refuse it.
    raw = pa.array(texts, pa.binary())
    pq.write_table(
        pa.table({"text": pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())}), path
    )


def as_arrow(path: Path, texts: list[bytes]) -> None:
    raw = pa.array(texts, pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "a.jsonl": as_jsonl,
    "b.parquet": as_parquet,
    "c.parquet": as_parquet_strings,
    "d.arrow": as_arrow,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_bad_bytes_cost_their_document_only(tmp_path: Path, name: str, bad: bytes) -> None:
    bad = bad.replace(b"\x00", b"") if name == "a.jsonl" else bad
    WRITERS[name](tmp_path / name, [b"before", bad, "\u00e9 after".encode()])
    read = read_source(tmp_path / name)
    assert read.texts == ["before", "\u00e9 after"]
    (drop,) = read.drops
    assert drop.reason == "invalid_utf8"
    assert drop.position in (1, 19)  # the row, or the byte its line begins at
    assert drop.detail


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_bad_bytes_in_a_text_file_drop_the_file_or_the_piece(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(b"before\n\n" + bad + b"\n\nafter\n")
    whole = read_source(tmp_path / "a.txt")
    assert (whole.texts, whole.reasons) == ([], [("invalid_utf8", 0)])
    split = read_source(tmp_path / "a.txt", separator="blank-lines")
    assert split.texts == ["before", "after"]
    assert [reason for reason, _ in split.reasons] == ["invalid_utf8"]


def test_lone_surrogates_written_as_escapes_are_bad_text(tmp_path: Path) -> None:
    lines = [r'{"text": "\ud800"}', r'{"text": "\udc00\ud800"}', r'{"text": "\ud83d\ude00"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    read = read_source(tmp_path / "a.jsonl")
    assert read.texts == ["\U0001f600"]
    assert [reason for reason, _ in read.reasons] == ["invalid_utf8"] * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_byte_order_mark_before_the_first_document_is_no_text(tmp_path: Path, name: str) -> None:
    body = json.dumps({"text": "x"}) if name == "a.jsonl" else "x"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + body.encode())
    assert read_source(tmp_path / name).texts == ["x"]


@settings(max_examples=60)
@given(texts=st.lists(st.binary(max_size=20), min_size=1, max_size=10))
def test_any_bytes_in_a_column_are_documents_or_counted_drops(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.parquet"
    as_parquet(path, texts)
    read = read_source(path)
    good, bad = [], []
    for k, text in enumerate(texts):
        try:
            value = text.decode()
        except UnicodeDecodeError:
            bad.append(("invalid_utf8", k))
        else:
            if value and not value.isspace():
                good.append(value)
            else:
                bad.append(("empty", k))
    assert read.texts == good
    assert read.reasons == bad
