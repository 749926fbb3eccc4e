"""CSV and TSV: what the csv module writes, rows that are none, values that are compared."""

from __future__ import annotations

import csv
import io
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inputs import lines, write
from support.reading import read_source, resolve_source

from olm_data.errors import InputError, UsageError

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
