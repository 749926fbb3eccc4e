"""Columns of tables and JSON: texts, ids, kept ones and their types; and batches of them."""

from __future__ import annotations

import hashlib
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import lines, write, write_rows, write_table
from support.project import Project
from support.reading import read_source, resolve_source
from support.tokenizing import make_recipe, texts

from olm_data.dataset.inputs import ReadOptions, Unit
from olm_data.errors import InputError
from olm_data.mixture.mix import mix
from olm_data.sources.base import RAW_BYTES, DocumentBatch, Scan
from olm_data.sources.buffers import choose, merge
from olm_data.sources.formats import describe
from olm_data.tokenization.base_dataset import BaseDataset
from olm_data.tokenization.request import prepare

TEXTS = [f"document {k} \u00e9" * (1 + k % 5) for k in range(50)]


def table(texts: pa.Array) -> pa.Table:
    n = len(texts)
    return pa.table(
        {
            "text": texts,
            "id": pa.array(range(n), pa.int64()),
            "url": [f"u{k}" for k in range(n)],
            "score": [k / 2 for k in range(n)],
            "flag": [k % 2 == 0 for k in range(n)],
            "tags": [["a", "b"]] * n,
        }
    )


ENDINGS = [".parquet", ".arrow", ".feather"]


TYPES = [
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.dictionary(pa.int32(), pa.string()),
]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_text_of_any_type_comes_out_with_ids_and_kept_columns(
    tmp_path: Path, ending: str, kind: pa.DataType
) -> None:
    values: list[str | None] = [*TEXTS]
    values[3], values[10], values[20] = None, "", " \n "
    path = write_table(tmp_path / f"a{ending}", table(pa.array(values, pa.string()).cast(kind)))
    read = read_source(path, keep=["url", "score", "flag", "tags"])
    good = [k for k in range(50) if k not in (3, 10, 20)]
    assert (read.texts, read.ids) == ([TEXTS[k] for k in good], [str(k) for k in good])
    assert [p for _, p in read.places] == good
    assert read.kept[5] == {"url": "u6", "score": 3.0, "flag": True, "tags": '["a","b"]'}
    assert sorted(read.reasons) == [("empty", 10), ("empty", 20), ("no_text", 3)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_units_of_any_size_give_what_the_whole_file_gives(tmp_path: Path, ending: str) -> None:
    path = write_table(tmp_path / f"a{ending}", table(pa.array(TEXTS)))
    whole = read_source(path)
    assert whole.units == 1
    for target in (1, 300, 1000):
        cut = read_source(path, target_bytes=target)
        assert cut.units > 1
        assert (cut.texts, cut.ids, cut.places) == (whole.texts, whole.ids, whole.places)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_table_without_the_text_column_is_refused_with_its_columns(
    tmp_path: Path, ending: str
) -> None:
    path = write_table(
        tmp_path / f"a{ending}", table(pa.array(TEXTS)).rename_columns(["content", *"bcdef"])
    )
    with pytest.raises(InputError, match="its columns are: content, b, c"):
        read_source(path)
    assert read_source(path, text_column="content").texts == TEXTS


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_text_column_of_numbers_is_refused(tmp_path: Path, ending: str) -> None:
    path = write_table(tmp_path / f"a{ending}", table(pa.array(range(5))))
    with pytest.raises(InputError, match="int64, not text"):
        read_source(path)


def test_an_empty_table_has_no_documents(tmp_path: Path) -> None:
    for ending in ENDINGS:
        path = write_table(tmp_path / f"a{ending}", table(pa.array([], pa.string())))
        assert read_source(path).texts == []


def scan(until: int | None) -> Scan:
    input = msgspec.structs.replace(describe("a.txt", 1, ""), until=until)
    return Scan(input, Unit(input=7, start=0, stop=1, bytes=1), ReadOptions())


def test_a_drop_keeps_the_start_of_a_long_record_and_its_whole_size() -> None:
    drop = scan(None).drop("malformed", 5, "why", b"x" * (RAW_BYTES + 3))
    assert (drop.input, drop.position, drop.detail) == (7, 5, "why")
    assert (len(drop.raw), drop.size) == (RAW_BYTES, RAW_BYTES + 3)


def test_the_last_record_to_read_is_read() -> None:
    assert [scan(4).is_past(k) for k in (3, 4, 5)] == [False, False, True]
    assert not scan(None).is_past(1 << 60)


def test_a_batch_without_documents_only_accounts_for_records() -> None:
    batch = DocumentBatch.without_documents(rows_in=3, skipped={(0, "filtered"): 3})
    assert (batch.documents, batch.rows_in, len(batch.data)) == (0, 3, 0)


def test_documents_are_cut_by_the_offsets() -> None:
    data = np.frombuffer("a\u00e9bc".encode(), np.uint8)
    zero = np.zeros(2, np.int32)
    batch = DocumentBatch(data, np.array([0, 3, 5]), zero, zero.astype(np.int64))
    assert [batch.text(k) for k in range(batch.documents)] == ["a\u00e9", "bc"]
    assert batch.text_bytes.tolist() == [3, 2]


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)


def batch_of(documents: list[tuple[int, str]], first: int, skipped: int = 0) -> DocumentBatch:
    """Return (input, text) pairs as a batch; positions and ids count from `first`."""
    texts = [text.encode() for _, text in documents]
    positions = np.arange(first, first + len(texts), dtype=np.int64)
    return DocumentBatch(
        data=np.frombuffer(b"".join(texts), np.uint8),
        offsets=np.cumsum([0, *map(len, texts)]).astype(np.int64),
        inputs=np.array([input for input, _ in documents], np.int32),
        positions=positions,
        ids=pa.array(map(str, positions), pa.string()),
        rows_in=len(texts) + skipped,
        skipped={(0, "filtered"): skipped} if skipped else {},
    )


@given(st.lists(st.tuples(st.integers(0, 2), TEXT, st.booleans()), max_size=12))
def test_choosing_keeps_what_is_chosen_and_counts_the_rest_by_input(
    documents: list[tuple[int, str, bool]],
) -> None:
    batch = batch_of([(input, text) for input, text, _ in documents], 5, skipped=2)
    kept = choose(batch, np.array([taken for *_, taken in documents], bool), "unsampled")
    expected = [(k, text) for k, (_, text, taken) in enumerate(documents, 5) if taken]
    assert [kept.text(k) for k in range(kept.documents)] == [text for _, text in expected]
    assert kept.positions.tolist() == [k for k, _ in expected]
    assert kept.ids.to_pylist() == [str(k) for k, _ in expected]
    lost = sorted(input for input, _, taken in documents if not taken)
    assert dict(kept.skipped) == {(0, "filtered"): 2} | {
        (input, "unsampled"): len(list(group)) for input, group in groupby(lost)
    }
    assert kept.rows_in == kept.documents + sum(kept.skipped.values())


@given(st.lists(st.tuples(st.lists(TEXT, max_size=4), st.integers(0, 3)), max_size=40))
def test_merging_keeps_every_document_and_every_count(parts: list[tuple[list[str], int]]) -> None:
    first, batches = 0, []
    for some, skipped in parts:
        batches.append(batch_of([(0, text) for text in some], first, skipped))
        first += len(some)
    merged = list(merge(batches, 16))
    found = [batch.text(k) for batch in merged for k in range(batch.documents)]
    assert found == [text for part, _ in parts for text in part]
    assert sum(batch.rows_in for batch in merged) == sum(batch.rows_in for batch in batches)
    assert sum(sum(batch.skipped.values()) for batch in merged) == sum(n for _, n in parts)


def numbered(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": f"t{k}", **row}) + "\n" for k, row in enumerate(rows))
    )
    return path


def values_kept(*paths: Path, keep: str = "x") -> list[Any]:
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
    path = numbered(tmp_path / "a.jsonl", [{"x": value} for value in values])
    assert resolve_source([str(path)], keep=["x"]).options.keep == (("x", kind),)
    assert values_kept(path) == (values if expected is None else expected)


def test_several_files_decide_together(tmp_path: Path) -> None:
    one = numbered(tmp_path / "a.jsonl", [{"x": 1}])
    two = numbered(tmp_path / "b.jsonl", [{"x": 2.5}])
    table = tmp_path / "c.parquet"
    pq.write_table(pa.table({"text": ["t"], "x": pa.array([3], pa.int32())}), table)
    assert values_kept(one, two, table) == [1.0, 2.5, 3.0]
    three = numbered(tmp_path / "d.jsonl", [{"x": "n/a"}])
    assert values_kept(one, three, table) == ["1", "n/a", "3"]


@pytest.mark.parametrize(
    ("first", "later"), [(1, "n/a"), (1, 2.5), (True, 1), (1.5, "x"), (1, True), (1.5, True)]
)
def test_a_later_value_of_another_type_is_an_error_that_says_what_to_type(
    tmp_path: Path, first: Any, later: Any
) -> None:
    filler = [{"x": first, "pad": "p" * 1000}] * 1200  # past what is looked at
    path = numbered(tmp_path / "a.jsonl", [*filler, {"x": later}])
    with pytest.raises(InputError, match="does not fit its type") as caught:
        values_kept(path)
    assert "--keep x:string" in str(caught.value)
    spelled = json.dumps(later) if not isinstance(later, str) else later
    assert values_kept(path, keep="x:string")[-1] == spelled


def test_a_type_may_be_said_and_a_name_with_a_colon_stays_a_name(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", [{"x": 1, "dc:title": "t", "a:string": 3}])
    assert values_kept(path, keep="x:double") == [1.0]
    options = resolve_source([str(path)], keep=["dc:title", "a:string"]).options
    assert options.keep == (("dc:title", "string"), ("a:string", "int64"))


def test_a_mixture_draws_on_the_numbers_that_were_kept(project: Project) -> None:
    rows = [{"score": k / 4, "text": text} for k, text in enumerate(texts(60))]
    path = numbered(project / "a.jsonl", rows)
    project.make([path], "web", keep=["score"])
    (project / "mix.yaml").write_text(
        "version: 1\nseed: 1\nsequence_length: 16\n"
        "sources: {web: {data: ./web, where: score >= 10, max_epochs: 9}}\n"
        "stages: [{name: main, tokens: 128, weights: {web: 1}}]\n"
    )
    assert b"score >= 10" in mix(str(project / "mix.yaml")).lock.encode()


def test_an_addition_keeps_the_types_of_the_dataset(project: Project) -> None:
    first = numbered(project / "a.jsonl", [{"x": 1.5}])
    project.make([first], keep=["x"])
    whole = numbered(project / "b.jsonl", [{"x": 2}])
    base = BaseDataset.open(str(project.out))
    found = prepare(make_recipe([whole]), [str(whole)], base)
    assert found.source.options.keep == (("x", "double"),)


def test_text_columns_make_the_bytes_they_always_made(project: Project) -> None:
    rows = [{"url": f"http://example.org/{k}", "text": text} for k, text in enumerate(texts(20))]
    path = numbered(project / "a.jsonl", rows)
    project.make([path], keep=["url"])
    table = pq.read_table(project.out / "shard-00000.docs.parquet")
    assert table.schema.field("url").type == pa.string()
    told = hashlib.sha256("\n".join(table["url"].to_pylist()).encode()).hexdigest()
    assert told == hashlib.sha256("\n".join(row["url"] for row in rows).encode()).hexdigest()


NESTED = [
    {"meta": {"id": f"r{k}", "score": k, "body": {"text": f"text {k}"}}, "n": k} for k in range(40)
]


@pytest.mark.parametrize(
    "ending", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow", ".feather"]
)
def test_text_id_kept_and_tested_columns_may_be_nested(tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path, ending, NESTED)
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
