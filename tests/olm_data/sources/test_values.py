"""Types of kept columns: found, said, refused where a value does not fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.project import Project
from support.reading import read_source, resolve_source
from support.tokenizing import make_recipe, texts

from olm_data.errors import InputError
from olm_data.mixture.mix import mix
from olm_data.tokenization.base_dataset import BaseDataset
from olm_data.tokenization.request import prepare


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": f"t{k}", **row}) + "\n" for k, row in enumerate(rows))
    )
    return path


def kept(*paths: Path, keep: str = "x") -> list[Any]:
    return [row["x"] for row in read_source(*paths, keep=[keep]).kept]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1, None, -(2**63)], "int64", None),
        ([1, 2.5, None], "double", [1.0, 2.5, None]),
        ([True, False, None], "bool", None),
        (["a", None], "string", None),
        ([1, "a"], "string", ["1", "a"]),
        ([True, 1], "string", ["true", "1"]),
        ([2**63], "string", [str(2**63)]),
        ([{"a": [1]}, None], "string", ['{"a":[1]}', None]),
        ([[1, "b"]], "string", ['[1,"b"]']),
        ([None, None], "string", None),
    ],
)
def test_a_kept_field_has_the_type_of_its_values(
    tmp_path: Path, values: list[Any], kind: str, expected: list[Any] | None
) -> None:
    path = write(tmp_path / "a.jsonl", [{"x": value} for value in values])
    assert resolve_source([str(path)], keep=["x"]).options.keep == (("x", kind),)
    assert kept(path) == (values if expected is None else expected)


def test_several_files_decide_together(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [{"x": 1}])
    two = write(tmp_path / "b.jsonl", [{"x": 2.5}])
    table = tmp_path / "c.parquet"
    pq.write_table(pa.table({"text": ["t"], "x": pa.array([3], pa.int32())}), table)
    assert kept(one, two, table) == [1.0, 2.5, 3.0]
    three = write(tmp_path / "d.jsonl", [{"x": "n/a"}])
    assert kept(one, three, table) == ["1", "n/a", "3"]


@pytest.mark.parametrize(
    ("first", "later"), [(1, "n/a"), (1, 2.5), (True, 1), (1.5, "x"), (1, True), (1.5, True)]
)
def test_a_later_value_of_another_type_is_an_error_that_says_what_to_type(
    tmp_path: Path, first: Any, later: Any
) -> None:
    filler = [{"x": first, "pad": "p" * 1000}] * 1200  # past what is looked at
    path = write(tmp_path / "a.jsonl", [*filler, {"x": later}])
    with pytest.raises(InputError, match="does not fit its type") as caught:
        kept(path)
    assert "--keep x:string" in str(caught.value)
    spelled = json.dumps(later) if not isinstance(later, str) else later
    assert kept(path, keep="x:string")[-1] == spelled


def test_a_type_may_be_said_and_a_name_with_a_colon_stays_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"x": 1, "dc:title": "t", "a:string": 3}])
    assert kept(path, keep="x:double") == [1.0]
    options = resolve_source([str(path)], keep=["dc:title", "a:string"]).options
    assert options.keep == (("dc:title", "string"), ("a:string", "int64"))


def test_a_mixture_draws_on_the_numbers_that_were_kept(project: Project) -> None:
    rows = [{"score": k / 4, "text": text} for k, text in enumerate(texts(60))]
    path = write(project / "a.jsonl", rows)
    project.make([path], "web", keep=["score"])
    (project / "mix.yaml").write_text(
        "version: 1\nseed: 1\nsequence_length: 16\n"
        "sources: {web: {data: ./web, where: score >= 10, max_epochs: 9}}\n"
        "stages: [{name: main, tokens: 128, weights: {web: 1}}]\n"
    )
    assert b"score >= 10" in mix(str(project / "mix.yaml")).lock.encode()


def test_an_addition_keeps_the_types_of_the_dataset(project: Project) -> None:
    first = write(project / "a.jsonl", [{"x": 1.5}])
    project.make([first], keep=["x"])
    whole = write(project / "b.jsonl", [{"x": 2}])
    base = BaseDataset.open(str(project.out))
    found = prepare(make_recipe([whole]), [str(whole)], base)
    assert found.source.options.keep == (("x", "double"),)


def test_text_columns_make_the_bytes_they_always_made(project: Project) -> None:
    rows = [{"url": f"http://example.org/{k}", "text": text} for k, text in enumerate(texts(20))]
    path = write(project / "a.jsonl", rows)
    project.make([path], keep=["url"])
    table = pq.read_table(project.out / "shard-00000.docs.parquet")
    assert table.schema.field("url").type == pa.string()
    told = hashlib.sha256("\n".join(table["url"].to_pylist()).encode()).hexdigest()
    assert told == hashlib.sha256("\n".join(row["url"] for row in rows).encode()).hexdigest()
