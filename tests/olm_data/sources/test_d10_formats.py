"""AUDIT row D10: nested fields, CSV and TSV, JSON arrays, .xz and .bz2."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reading import read_source
from support.tokenizing import digests, make_dataset, texts

from olm_data.errors import InputError, UsageError
from olm_data.sources import resolve_source
from olm_data.sources.decompress import decompressed

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
# what may stand in a field: quotes, both line ends, separators, no ASCII
FIELDS = st.text(st.sampled_from('ab"\r\n,;\t \u4f60\u0000'), max_size=12)
QUICK = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# --- compression ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv"])
def test_d10_every_format_is_read_in_every_compression(
    tmp_path: Path, name: str, ending: str
) -> None:
    rows = [{"text": f"text {k}"} for k in range(3)]
    content = {
        "a.jsonl": lines(rows),
        "a.json": json.dumps(rows, indent=2).encode(),
        "a.txt": b"text 0\n\ntext 1\n\ntext 2\n",
        "a.csv": b"n,text\n0,text 0\n1,text 1\n2,text 2\n",
    }[name]
    path = write(tmp_path / (name + ending), PACKED[ending](content))
    options = {"separator": "blank-lines"} if name == "a.txt" else {}
    assert read_source(path, **options).texts == ["text 0", "text 1", "text 2"]


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_d10_streams_one_after_another_are_one_and_a_cut_one_is_an_error(
    tmp_path: Path, ending: str
) -> None:
    pack = PACKED[ending]
    whole = pack(lines([{"text": "one"}])) + pack(b"") + pack(lines([{"text": "two"}]))
    assert read_source(write(tmp_path / f"a.jsonl{ending}", whole)).texts == ["one", "two"]
    if ending == ".xz":
        padded = write(tmp_path / f"p.jsonl{ending}", whole + b"\0" * 8)
        assert read_source(padded).texts == ["one", "two"]
    for cut in (1, 20, len(whole) - 3):
        with pytest.raises(InputError, match="truncated or damaged"):
            read_source(write(tmp_path / f"b.jsonl{ending}", whole[:cut]))
    with pytest.raises(InputError, match="truncated or damaged"):
        read_source(write(tmp_path / f"c.jsonl{ending}", whole + b"garbage"))


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("zeros", [4, 512, 300_000])
def test_d8_zero_bytes_after_and_between_compressed_streams_are_no_data(
    tmp_path: Path, ending: str, zeros: int
) -> None:
    """As tape tools and block devices leave them, and as gzip(1), bzip2(1) and xz(1) read them."""
    one, two = (PACKED[ending](lines([{"text": text}])) for text in ("one", "two"))
    path = write(tmp_path / f"a.jsonl{ending}", one + bytes(zeros))
    assert read_source(path).texts == ["one"]
    path.write_bytes(one + bytes(zeros) + two + bytes(zeros))
    assert read_source(path).texts == ["one", "two"]
    for wrong in (bytes(zeros) + b"x", b"x" + bytes(zeros), bytes(zeros) + two[:-9]):
        path.write_bytes(one + wrong)
        with pytest.raises(InputError, match="truncated or damaged"):
            read_source(path)
    if ending == ".xz":
        path.write_bytes(one + bytes(zeros + 1))
        with pytest.raises(InputError, match="zero bytes after the end"):
            read_source(path)


def test_d8_one_zero_byte_after_gzip_is_no_data_and_zeros_alone_are_no_gzip(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(lines([{"text": "one"}])) + b"\0")
    assert read_source(path).texts == ["one"]
    path.write_bytes(bytes(1000))
    with pytest.raises(InputError, match="truncated or damaged"):
        read_source(path)


@given(cut=st.lists(st.integers(0, 5), max_size=4), size=st.integers(1, 9), zeros=st.booleans())
@QUICK
def test_d8_gzip_members_are_one_stream_however_it_is_read(
    cut: list[int], size: int, zeros: bool
) -> None:
    members = [bytes(range(n * 40)) for n in cut]
    stored = b"".join(gzip.compress(m) + bytes(3 * zeros) for m in members)
    stream = decompressed(io.BytesIO(stored), "gzip")
    assert b"".join(iter(lambda: stream.read(size), b"")) == b"".join(members)


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_d10_a_bomb_is_refused_in_bounded_memory(tmp_path: Path, ending: str) -> None:
    line = b'{"text": "' + b"x" * (1 << 20) + b'"}\n'
    if ending == ".xz":
        packer = lzma.LZMACompressor(preset=0)
        bomb = b"".join(packer.compress(line) for _ in range(100)) + packer.flush()
    else:
        bomb = PACKED[ending](line * 100)
    path = write(tmp_path / f"a.jsonl{ending}", bomb)
    with pytest.raises(InputError, match="it may be a bomb"):
        for _ in resolve_and_read(path):
            pass


def test_d10_an_xz_frame_that_asks_for_a_gigabyte_is_refused(tmp_path: Path) -> None:
    small = {"id": lzma.FILTER_LZMA2, "dict_size": 4096}
    stream = bytearray(lzma.compress(b'{"text": "x"}\n', filters=[small]))
    # the dictionary's size is one byte of the block header, under a checksum of its own
    header = stream[12 : 12 + (stream[12] + 1) * 4]
    place = header.index(b"\x21\x01") + 2
    header[place] = 38  # 2^31 bytes
    header[-4:] = zlib.crc32(bytes(header[:-4])).to_bytes(4, "little")
    stream[12 : 12 + len(header)] = header
    with pytest.raises(InputError, match="truncated or damaged") as caught:
        read_source(write(tmp_path / "a.jsonl.xz", bytes(stream)))
    assert "emory" in str(caught.value)


def resolve_and_read(path: Path) -> Any:
    from olm_data.sources import plan_units, read_units

    plan = resolve_source([str(path)])
    units = plan_units(0, plan.inputs[0], plan.options, 1 << 30)
    return read_units(plan.inputs, units, plan.options)


# --- nested fields -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ending", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow", ".feather"]
)
def test_d10_text_id_kept_and_tested_columns_may_be_nested(tmp_path: Path, ending: str) -> None:
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
def test_d10_a_field_whose_name_holds_the_dot_comes_first(tmp_path: Path, ending: str) -> None:
    rows = [{"a.b": "own", "a": {"b": "nested"}}]
    path = tmp_path / f"a{ending}"
    if ending == ".jsonl":
        path.write_bytes(lines(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert read_source(path, text_column="a.b").texts == ["own"]


def test_d10_a_record_without_the_nested_text_is_a_drop_with_its_place(tmp_path: Path) -> None:
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


# --- CSV -----------------------------------------------------------------------------------------


@QUICK
@given(rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=8), tabs=st.booleans())
def test_d10_what_the_csv_module_writes_is_read_back(
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


def test_d10_csv_rows_that_are_no_rows_are_counted_with_their_bytes(tmp_path: Path) -> None:
    content = (
        b'\xef\xbb\xbfid,text\r\n1,one\r\n\r\n2\r\n3,three,more\r\n4,"fo""ur\r\nlines"\r\n'
        b'5,"a"b\r\n6,b\xffad\r\n7,last'
    )
    path = write(tmp_path / "a.csv", content)
    read = read_source(path)
    assert read.texts == ["one", 'fo"ur\r\nlines', "last"]
    assert read.ids == ["1", "4", "7"]
    assert sorted(read.reasons, key=lambda pair: pair[1]) == [
        ("malformed", 1),
        ("malformed", 2),
        ("malformed", 4),
        ("invalid_utf8", 5),
    ]
    raws = {drop.position: drop.raw for drop in read.drops}
    assert raws[2] == b"3,three,more\r\n"
    assert raws[5] == b"b\xffad"
    assert read_source(path, on_invalid="replace").texts[2] == "b\ufffdad"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'id,text\n1,"never closed\n2,two\n', "does not end before the file does"),
        (b"a,b\n1,2\n", "no column 'text'"),
        (b"", "no column 'text'"),
        (b"text,text\n1,2\n", "2 columns have the name 'text'"),
        (b'text\n"' + b"x\n" * (5 << 20), "a row longer than"),
        (b"text\n" + b"x" * (9 << 20), "a row longer than"),
        (b"x," * 20_000 + b"\n", "20,001 columns"),
    ],
    ids=["open", "no column", "empty", "twice", "long quote", "long line", "wide"],
)
def test_d10_csv_that_cannot_be_read_is_refused_in_bounded_memory(
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


def test_d10_csv_values_are_compared_as_what_they_are_compared_with(tmp_path: Path) -> None:
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


def test_d10_another_delimiter_is_said_and_part_of_the_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"id;text\n1;one, two\n")
    with pytest.raises(InputError, match="id;text"):
        read_source(path)
    assert read_source(path, delimiter=";").texts == ["one, two"]
    assert resolve_source([str(path)], delimiter=";").options.stored()["delimiter"] == ";"
    tabs = write(tmp_path / "b.csv", b"id\ttext\n1\tone\n")
    assert read_source(tabs, delimiter="\\t").texts == ["one"]
    other = write(tmp_path / "c.jsonl", lines([{"text": "x"}]))
    for argument, wrong in ((path, ";;"), (path, '"'), (path, ""), (other, ";")):
        with pytest.raises(UsageError, match="a delimiter is one character"):
            read_source(argument, delimiter=wrong)


# --- JSON arrays ---------------------------------------------------------------------------------

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
def test_d10_a_json_array_is_read_as_the_same_json_lines(
    tmp_path: Path, rows: list[Any], indent: int | None, chunk: int
) -> None:
    import olm_data.sources.json_array as module

    kept, module._CHUNK = module._CHUNK, chunk
    try:
        array = read_source(write(tmp_path / "a.json", json.dumps(rows, indent=indent).encode()))
    finally:
        module._CHUNK = kept
    same = read_source(write(tmp_path / "b.jsonl", lines(rows)))
    assert (array.texts, len(array.drops)) == (same.texts, len(same.drops))
    assert [rows[place]["text"] for _, place in array.places] == array.texts


def test_d10_elements_that_are_no_records_are_counted_with_their_bytes(tmp_path: Path) -> None:
    content = b'[{"text": "one"}, 3, "x", {"text": null}, [1], {"text": oops}, {"text": "two"}]\n'
    read = read_source(write(tmp_path / "a.json", content))
    assert read.texts == ["one", "two"]
    assert read.places == [("a.json", 0), ("a.json", 6)]
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
def test_d10_what_is_no_array_is_refused_and_nothing_of_it_is_lost(
    tmp_path: Path, content: bytes
) -> None:
    path = write(tmp_path / "a.json", content)
    with pytest.raises(InputError, match="array"):
        read_source(path)


def test_d10_a_json_file_of_lines_stays_json_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", lines([{"text": "one"}, {"text": "two"}]))
    (file,) = resolve_source([str(path)]).inputs
    assert (file.format, file.position) == ("jsonl", "byte")
    assert read_source(path).texts == ["one", "two"]


def test_d10_arrays_and_tables_make_the_same_dataset_whatever_the_workers_and_verify_deeply(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    from olm_data.verify.deep import Deep
    from olm_data.verify.run import verify

    folder = tmp_path / "in"
    folder.mkdir()
    documents = texts(60)
    write(folder / "a.json", json.dumps([{"text": text} for text in documents[:20]]).encode())
    out = io.StringIO()
    csv.writer(out, delimiter=";").writerows([["text"], *([text] for text in documents[20:40])])
    write(folder / "b.csv", out.getvalue().encode())
    write(folder / "c.jsonl.xz", lzma.compress(lines([{"text": text} for text in documents[40:]])))
    for name in ("one", "two"):
        done = make_dataset([folder], tiny_tokenizer, tmp_path / name, delimiter=";")
    assert done.manifest.totals.documents == 60
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    report = verify(str(tmp_path / "one"), deep=Deep(root=str(folder), share=1, seed=0))
    assert report.ok
    assert not report.unproved
