"""Columns inside others, and names that stand for two columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.inputs import lines, write, write_rows, write_table
from support.reading import read_source

from olm_data.errors import InputError

ROWS = [
    {"meta": {"id": f"r{k}", "score": k, "body": {"text": f"text {k}"}}, "n": k} for k in range(40)
]


@pytest.mark.parametrize(
    "ending", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow", ".feather"]
)
def test_text_id_kept_and_tested_columns_may_be_nested(tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path, ending, ROWS)
    read = read_source(
        path,
        text_column="meta.body.text",
        id_column="meta.id",
        keep=["meta.score", "n"],
        where="meta.score >= 5 and not `meta.score` == 7",
        target_bytes=100,
    )
    taken = [k for k in range(40) if k >= 5 and k != 7]
    assert (read.texts, read.ids) == ([f"text {k}" for k in taken], [f"r{k}" for k in taken])
    assert read.kept == [{"meta.score": k, "n": k} for k in taken]
    assert read.skipped == {"filtered": 6}
    with pytest.raises(InputError, match=r"did you mean 'meta\.body\.text'"):
        read_source(path, text_column="meta.body.txt")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_field_whose_name_holds_the_dot_comes_first(tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path, ending, [{"a.b": "own", "a": {"b": "nested"}}])
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
        return write_table(tmp_path / f"{name}{ending}", table)

    for columns in (["text", "text"], ["text", "id", "id"]):
        with pytest.raises(InputError, match="2 columns have the name"):
            read_source(write("a", columns))
    twice = write("b", ["text", "x", "x"])
    assert read_source(twice).texts == ["a", "b"]
    for options in ({"keep": ["x"]}, {"where": "x == 'a'"}):
        with pytest.raises(InputError, match="2 columns have the name 'x'"):
            read_source(twice, **options)
