"""Columns inside others, and names that stand for two columns."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.inputs import lines, write
from support.reading import read_source

from olm_data.errors import InputError

PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


ROWS = [
    {"meta": {"id": f"r{k}", "score": k, "body": {"text": f"text {k}"}}, "n": k} for k in range(40)
]


@pytest.mark.parametrize(
    "ending", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow", ".feather"]
)
def test_text_id_kept_and_tested_columns_may_be_nested(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    table = pa.Table.from_pylist(ROWS)
    if ending == ".parquet":
        pq.write_table(table, path, row_group_size=8)
    elif ending in (".arrow", ".feather"):
        new = pa.ipc.new_stream if ending == ".arrow" else pa.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=8)
    elif ending == ".json":
        path.write_text(json.dumps(ROWS))
    else:
        path.write_bytes(PACKED[ending.removeprefix(".jsonl")](lines(ROWS)))
    read = read_source(
        path,
        text_column="meta.body.text",
        id_column="meta.id",
        keep=["meta.score", "n"],
        where="meta.score >= 5 and not `meta.score` == 7",
        target_bytes=100,
    )
    taken = [k for k in range(40) if k >= 5 and k != 7]
    assert read.texts == [f"text {k}" for k in taken]
    assert read.ids == [f"r{k}" for k in taken]
    assert read.kept == [{"meta.score": k, "n": k} for k in taken]
    assert read.skipped == {"filtered": 6}
    with pytest.raises(InputError, match=r"did you mean 'meta\.body\.text'"):
        read_source(path, text_column="meta.body.txt")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_field_whose_name_holds_the_dot_comes_first(tmp_path: Path, ending: str) -> None:
    rows = [{"a.b": "own", "a": {"b": "nested"}}]
    path = tmp_path / f"a{ending}"
    if ending == ".jsonl":
        path.write_bytes(lines(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert read_source(path, text_column="a.b").texts == ["own"]


def test_a_record_without_the_nested_text_is_a_drop_with_its_place(tmp_path: Path) -> None:
    bad: list[Any] = [{}, {"a": None}, {"a": "x"}, {"a": {"b": 3}}, {"a": {"b": None}}, {"a": []}]
    path = write(tmp_path / "a.jsonl", lines([{"a": {"b": "text"}}, *bad, {"a": {"b": "last"}}]))
    read = read_source(path, text_column="a.b")
    assert read.texts == ["text", "last"]
    assert [reason for reason, _ in read.reasons] == ["no_text"] * 6
    broken = b'{"a": {"b": "x\\ud800y", "c": 1}}\n{"a": {"b": "fine"}}\n'
    path = write(tmp_path / "b.jsonl", broken)
    assert read_source(path, text_column="a.b").reasons == [("invalid_utf8", 0)]
    mended = read_source(path, text_column="a.b", on_invalid="replace")
    assert mended.texts == ["x\ufffdy", "fine"]


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".feather"])
def test_two_columns_of_one_name_are_refused_only_where_they_are_read(
    tmp_path: Path, ending: str
) -> None:
    def write(name: str, columns: list[str]) -> Path:
        table = pa.Table.from_arrays([pa.array(["a", "b"])] * len(columns), names=columns)
        path = tmp_path / f"{name}{ending}"
        if ending == ".parquet":
            pq.write_table(table, path)
        else:
            new = pa.ipc.new_stream if ending == ".arrow" else pa.ipc.new_file
            with new(path, table.schema) as writer:
                writer.write_table(table)
        return path

    for columns in (["text", "text"], ["text", "id", "id"]):
        with pytest.raises(InputError, match="2 columns have the name"):
            read_source(write("a", columns))
    twice = write("b", ["text", "x", "x"])
    assert read_source(twice).texts == ["a", "b"]
    for options in ({"keep": ["x"]}, {"where": "x == 'a'"}):
        with pytest.raises(InputError, match="2 columns have the name 'x'"):
            read_source(twice, **options)
