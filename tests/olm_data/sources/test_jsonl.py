"""JSON Lines: a good line is a document, any other a counted drop, wherever units are cut."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inputs import lines
from support.reading import read_source

from olm_data.errors import InputError

GOOD = [{"text": f"document {k}", "id": f"id-{k}", "n": k} for k in range(20)]


def pack(data: bytes, ending: str) -> bytes:
    if ending.endswith(".gz"):
        return gzip.compress(data, mtime=0)
    if ending.endswith(".zst"):
        return zstandard.ZstdCompressor().compress(data)
    return data


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst"])
def test_texts_ids_and_kept_fields_come_out_in_order(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(pack(lines(GOOD), ending))
    read = read_source(path, keep=["n"])
    assert (read.texts, read.ids) == ([r["text"] for r in GOOD], [r["id"] for r in GOOD])
    assert (read.kept, read.drops) == ([{"n": r["n"]} for r in GOOD], [])


def test_positions_are_byte_offsets_in_plain_files_and_line_numbers_in_compressed_ones(
    tmp_path: Path,
) -> None:
    data = b'{"text": "a"}\n\n  \n{"text": "\xc3\xa9"}\r\n{"text": "c"}'
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    plain, packed = read_source(tmp_path / "a.jsonl"), read_source(tmp_path / "b.jsonl.gz")
    assert plain.texts == packed.texts == ["a", "\u00e9", "c"]
    assert [p for _, p in plain.places] == [0, data.index(b'{"text": "\xc3'), data.rindex(b"{")]
    assert [p for _, p in packed.places] == [0, 3, 4]


@settings(max_examples=40)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=30).map(lambda t: json.dumps({"text": t}).encode()),
            st.sampled_from([b"", b"  ", b"oops", b'{"x": 1}', b'{"text": "' + b"y" * 300 + b'"}']),
            st.binary(max_size=12).filter(lambda b: b"\n" not in b),
        ),
        max_size=12,
    ),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.integers(1, 200),
)
def test_units_of_any_size_give_what_the_whole_file_gives(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[bytes],
    end: bytes,
    closed: bool,
    target: int,
) -> None:
    path = tmp_path_factory.mktemp("units") / "a.jsonl"
    first = b'{"text": "always one good line"}'
    path.write_bytes(end.join([first, *parts]) + (end if closed else b""))
    whole, cut = read_source(path), read_source(path, target_bytes=target)
    assert (whole.texts, whole.places) == (cut.texts, cut.places)
    assert whole.drops == cut.drops
    records = sum(1 for part in b"\n".join([first, *parts]).split(b"\n") if part.strip())
    assert len(whole.texts) + len(whole.drops) == records


def test_batches_are_bounded_by_bytes_however_long_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        lines([{"text": "x" * size} for size in (10, 9_000_000, 10, 3_000_000, 2_000_000)])
    )
    read = read_source(path)
    assert [len(text) for text in read.texts] == [10, 9_000_000, 10, 3_000_000, 2_000_000]
    assert read.batches >= 3


def test_an_empty_file_has_no_documents_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(lines(GOOD[:1]))
    read = read_source(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert read.texts == ["document 0"]


def test_a_file_without_the_text_field_is_refused_with_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"texts": "a", "url": "b"}] * 3))
    with pytest.raises(InputError) as caught:
        read_source(path)
    assert "texts, url" in str(caught.value)
    assert "did you mean 'texts'?" in str(caught.value)
    assert "a.jsonl" in str(caught.value)


def test_a_later_file_without_the_text_field_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD))
    (tmp_path / "b.jsonl").write_bytes(lines([{"content": "a"}] * 3))
    with pytest.raises(InputError, match="content"):
        read_source(tmp_path / "a.jsonl", tmp_path / "b.jsonl")


def test_an_array_named_as_lines_is_refused_and_not_dropped_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD, indent=1))
    with pytest.raises(InputError, match="no line at the start of the file is a JSON object"):
        read_source(path)


def test_a_kept_or_id_field_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(GOOD))
    for arguments in ({"keep": ["m"]}, {"id_column": "ids"}):
        with pytest.raises(InputError, match="there is no column"):
            read_source(path, **arguments)
