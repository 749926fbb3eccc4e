"""Row 21: empty and white-space documents are dropped and counted, whatever the format."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reading import read_source

SPACES = [chr(c) for c in range(0x110000) if chr(c).isspace()]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_each_kind_of_white_space_is_an_empty_document(tmp_path: Path, name: str) -> None:
    texts = ["", *SPACES, "".join(SPACES) * 100, *(f"{s}x" for s in SPACES)]
    table = pa.table({"text": texts})
    if name == "a.jsonl":
        (tmp_path / name).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    elif name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    read = read_source(tmp_path / name)
    assert read.texts == [f"{s}x" for s in SPACES]
    assert [reason for reason, _ in read.reasons] == ["empty"] * (len(SPACES) + 2)


@settings(max_examples=60)
@given(texts=st.lists(st.text(st.sampled_from(["a", "\u00e9", *SPACES]), max_size=6), min_size=1))
def test_what_is_dropped_is_exactly_what_has_no_visible_character(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("empty") / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    read = read_source(path)
    assert read.texts == [text for text in texts if text.strip()]
    assert len(read.drops) == len(texts) - len(read.texts)


def test_an_empty_text_file_is_a_counted_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf \n")
    assert [reason for reason, _ in read_source(tmp_path).reasons] == ["empty", "empty"]
