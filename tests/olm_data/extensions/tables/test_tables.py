"""Tables: Arrow files of `datasets`, CSV and TSV, arrays of JSON; what is none of them."""

from __future__ import annotations

import csv
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inputs import lines, write
from support.reading import read_source, resolve_source

from olm_data.errors import InputError, UsageError

TEXTS = [f"document {k} \u00e9" * (1 + k % 5) for k in range(50)]


def test_a_folder_saved_by_datasets_is_read_in_its_own_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": TEXTS, "id": list(map(str, range(50)))}).save_to_disk(
        str(folder), num_shards=3
    )
    read = read_source(folder)
    assert read.texts == TEXTS
    assert {path for path, _ in read.places} == {f"data-{k:05d}-of-00003.arrow" for k in range(3)}


def test_a_folder_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(InputError, match="several splits"):
        read_source(tmp_path)


# what may stand in a field: quotes, both line ends, separators, no ASCII
FIELDS = st.text(st.sampled_from('ab"\r\n,;\t \u4f60\u0000'), max_size=12)


QUICK = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=8), tabs=st.booleans())
def test_what_the_csv_module_writes_is_read_back(
    tmp_path: Path, rows: list[tuple[str, str]], tabs: bool
) -> None:
    out = io.StringIO()
    writer = csv.writer(out, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_ALL)
    writer.writerows([("id", "text"), *rows])
    path = write(tmp_path / ("a.tsv" if tabs else "a.csv"), out.getvalue().encode())
    read = read_source(path)
    kept = [(k, row) for k, row in enumerate(rows) if row[1].strip()]
    assert read.texts == [text for _, (_, text) in kept]
    assert read.ids == [name for _, (name, _) in kept]
    assert [place for _, place in read.places] == [k for k, _ in kept]


def test_csv_rows_that_are_no_rows_are_counted_with_their_bytes(tmp_path: Path) -> None:
    content = (
        b'\xef\xbb\xbfid,text\r\n1,one\r\n\r\n2\r\n3,three,more\r\n4,"fo""ur\r\nlines"\r\n'
        b'5,"a"b\r\n6,b\xffad\r\n7,last'
    )
    path = write(tmp_path / "a.csv", content)
    read = read_source(path)
    assert (read.texts, read.ids) == (["one", 'fo"ur\r\nlines', "last"], ["1", "4", "7"])
    assert sorted(read.reasons, key=lambda pair: pair[1]) == [
        ("malformed", 1),
        ("malformed", 2),
        ("malformed", 4),
        ("invalid_utf8", 5),
    ]
    raws = {drop.position: drop.raw for drop in read.drops}
    assert (raws[2], raws[5]) == (b"3,three,more\r\n", b"b\xffad")
    assert read_source(path, on_invalid="replace").texts[2] == "b\ufffdad"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'id,text\n1,"never closed\n2,two\n', "does not end before the file does"),
        (b"a,b\n1,2\n", "no column 'text'"),
        (b"", "no column 'text'"),
        (b"text,text\n1,2\n", "2 columns have the name 'text'"),
        (b'text\n"' + (b"x" * 63 + b"\n") * (5 << 15), "a row longer than"),
        (b"text\n" + b"x" * (9 << 20), "a row longer than"),
        (b"x," * 20_000 + b"\n", "20,001 columns"),
    ],
    ids=["open", "no column", "empty", "twice", "long quote", "long line", "wide"],
)
def test_csv_that_cannot_be_read_is_refused_in_bounded_memory(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = write(tmp_path / "a.csv", content)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=message):
            read_source(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_csv_values_are_compared_as_what_they_are_compared_with(tmp_path: Path) -> None:
    content = b"text,score,good,url\na,3.5,true,u\nb,2,false,v\nc,,TRUE,\nd,n/a,no,w\n"
    path = write(tmp_path / "a.csv", content)
    assert read_source(path, where="score >= 3").texts == ["a"]
    assert read_source(path, where="score is None").texts == ["c"]
    assert read_source(path, where="good").texts == ["a", "c"]
    assert read_source(path, where="url in ['v', 'w']").texts == ["b", "d"]
    assert read_source(path, keep=["score"]).kept[3] == {"score": "n/a"}
    with pytest.raises(InputError, match="--keep score:string"):
        read_source(path, keep=["score:double"])
    typed = write(tmp_path / "b.csv", b"text,score\na,3.5\nb,\n")
    assert read_source(typed, keep=["score:double"]).kept == [{"score": 3.5}, {"score": None}]


def test_another_delimiter_is_said_and_part_of_the_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"id;text\n1;one, two\n")
    with pytest.raises(InputError, match="id;text"):
        read_source(path)
    assert read_source(path, delimiter=";").texts == ["one, two"]
    assert resolve_source([str(path)], delimiter=";").options.delimiter == ";"
    tabs = write(tmp_path / "b.csv", b"id\ttext\n1\tone\n")
    assert read_source(tabs, delimiter="\\t").texts == ["one"]
    other = write(tmp_path / "c.jsonl", lines([{"text": "x"}]))
    for argument, wrong in ((path, ";;"), (path, '"'), (path, ""), (other, ";")):
        with pytest.raises(UsageError, match="a delimiter is one character"):
            read_source(argument, delimiter=wrong)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\{}[],\u4f60', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab]", max_size=3), inner),
    max_leaves=6,
)


@QUICK
@given(
    rows=st.lists(st.fixed_dictionaries({"text": st.text('ab"\\', max_size=9), "x": VALUES})),
    indent=st.none() | st.integers(0, 2),
    chunk=st.sampled_from([1, 2, 7, 1 << 20]),
)
def test_a_json_array_is_read_as_the_same_json_lines(
    tmp_path: Path, rows: list[Any], indent: int | None, chunk: int
) -> None:
    import olm_data.extensions.tables.json_array as module

    kept, module._CHUNK = module._CHUNK, chunk
    try:
        array = read_source(write(tmp_path / "a.json", json.dumps(rows, indent=indent).encode()))
    finally:
        module._CHUNK = kept
    same = read_source(write(tmp_path / "b.jsonl", lines(rows)))
    assert (array.texts, len(array.drops)) == (same.texts, len(same.drops))
    assert [rows[place]["text"] for _, place in array.places] == array.texts


def test_elements_that_are_no_records_are_counted_with_their_bytes(tmp_path: Path) -> None:
    content = b'[{"text": "one"}, 3, "x", {"text": null}, [1], {"text": oops}, {"text": "two"}]\n'
    read = read_source(write(tmp_path / "a.json", content))
    assert (read.texts, read.places) == (["one", "two"], [("a.json", 0), ("a.json", 6)])
    kinds = ["malformed", "malformed", "no_text", "malformed", "malformed"]
    assert read.reasons == list(zip(kinds, range(1, 6), strict=True))
    assert read.drops[4].raw == b'{"text": oops}'


@pytest.mark.parametrize(
    "content",
    [
        b'[{"text": "x"}',
        b"[",
        b'[{"text": "x',
        b'[{"text": "x"},]',
        b'[,{"text": "x"}]',
        b'[{"text": "x"}] {"text": "lost"}',
        b'[{"text": "x"}}',
        b'[{"text": "x"}]]',
    ],
)
def test_what_is_no_array_is_refused_and_nothing_of_it_is_lost(
    tmp_path: Path, content: bytes
) -> None:
    path = write(tmp_path / "a.json", content)
    with pytest.raises(InputError, match="array"):
        read_source(path)


def test_a_json_file_of_lines_stays_json_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", lines([{"text": "one"}, {"text": "two"}]))
    (file,) = resolve_source([str(path)]).inputs
    assert (file.format, file.position) == ("jsonl", "byte")
    assert read_source(path).texts == ["one", "two"]
