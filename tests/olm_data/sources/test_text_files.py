"""Files of text, JSON Lines and compressed ones: each record once, wherever files are cut."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import Olm
from support.inputs import lines, write
from support.reading import read_source

from olm_data.decompress import decompressed
from olm_data.errors import InputError
from olm_data.sources import line_blocks, txt
from olm_data.sources.formats import describe
from olm_data.sources.line_blocks import plain_blocks, stream_blocks
from olm_data.sources.listing import list_files
from olm_data.sources.txt import notes

GOOD = [{"text": f"document {k}", "id": f"id-{k}", "n": k} for k in range(20)]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst"])
def test_texts_ids_and_kept_fields_come_out_in_order(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(PACKED[ending.removeprefix(".jsonl").removeprefix(".json")](lines(GOOD)))
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


def test_a_bad_record_that_the_condition_leaves_out_is_not_called_bad(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "one", "n": 1}\n{broken\n{"text": 3, "n": 1}\n{"text": 3, "n": 0}\n'
        b'{"text": "\xff", "n": 0}\n{"text": "\xff", "n": 1}\n{"n": 0}\n{"text": "two", "n": "1"}\n'
    )
    read = read_source(path, where="n == 1")
    assert read.texts == ["one"]
    assert [reason for reason, _ in read.reasons] == ["malformed", "no_text", "invalid_utf8"]
    assert read.skipped == {"filtered": 4}


ODD_LINES = {
    b'{"text": "cut': "malformed",
    b"not json": "malformed",
    b"[1, 2]": "malformed",
    b'"text"': "malformed",
    b'{"text": "two"} {"text": "objects"}': "malformed",
    b'{"text": "raw\ttab"}': "malformed",
    b"[" * 100_000: "malformed",
    b'{"text": "one", "text": "other"}': "malformed",
    b'{"text": "one", "te\\u0078t": "written otherwise", "text" : null}': "malformed",
    b'{"text": "one \xff", "text": "other"}': "malformed",
    b'{"text": "one", "n": {"text": "inner"}, "text": "other"}': "malformed",
    b'{"id": "no text"}': "no_text",
    b'{"text": null}': "no_text",
    b'{"text": 7}': "no_text",
    b'{"text": ["a"]}': "no_text",
    b'{"text": "\xff\xfe"}': "invalid_utf8",
    b'{"text": "\xed\xa0\x80"}': "invalid_utf8",
    b'{"text": "\xc0\xaf"}': "invalid_utf8",
    b'{"text": "lone \\ud800 surrogate"}': "invalid_utf8",
    b'{"text": ""}': "empty",
    b'{"text": " \\n\\t\\u00a0\\u3000"}': "empty",
}


@pytest.mark.parametrize(("line", "reason"), ODD_LINES.items(), ids=lambda v: str(v)[:30])
def test_an_odd_line_is_dropped_with_its_reason_and_place_and_its_neighbours_are_kept(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    read = read_source(path)
    assert (read.texts, read.reasons) == (["before", "after"], [(reason, 19)])
    assert all(drop.detail.isprintable() for drop in read.drops)


def test_bad_metadata_does_not_cost_a_good_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "a", "meta": "\xff"}\n{"text": "b", "meta": NaN}\n'
        b'{"text": "c", "meta": "\\ud800"}\n{"text": "d", "id": "\\ud800"}\n'
    )
    read = read_source(path)
    assert (read.texts, read.ids) == (["a", "b", "c", "d"], [None, None, None, "\\ud800"])


def test_objects_that_go_on_over_lines_are_not_taken_for_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":\n"a"}{"text":"b"}\n{"text":"c"}\n')
    read = read_source(path)
    assert read.texts == ["c"]
    assert [reason for reason, _ in read.reasons] == ["malformed", "malformed"]


def test_ids_of_any_json_type_become_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"text": "a", "id": i} for i in ("x", 7, None, [1, "\u00e9"], 1.5)]))
    assert read_source(path).ids == ["x", "7", None, '[1,"\u00e9"]', "1.5"]


def test_a_name_that_stands_twice_elsewhere_is_no_second_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"kind": "text", "text": "text"}\n{"text": "b", "meta": {"text": "c", "text": "d"}}\n'
        b'{"text": "c", "a\\"text": "text"}\n{"te\\u0078t": "d"}\n'
    )
    assert read_source(path).texts == ["text", "b", "c", "d"]


LINE_LISTS = st.lists(st.text("ab \r", max_size=9).map(str.encode), max_size=20)


MANY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MANY
@given(LINE_LISTS, st.booleans(), st.lists(st.integers(0, 200), max_size=5), st.integers(1, 12))
def test_ranges_of_a_plain_file_give_each_line_once_with_its_offset(
    tmp_path: Path, lines: list[bytes], ended: bool, cuts: list[int], chunk: int
) -> None:
    data = b"\n".join(lines) + b"\n" * ended
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    found = b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_blocks, "CHUNK", chunk)
        for start, stop in pairwise(places):
            for block, place in plain_blocks(describe(str(path), len(data), ""), start, stop):
                assert place == len(found)
                assert block.endswith(b"\n") or place + len(block) == len(data)
                found += block
    assert found == data


@MANY
@given(LINE_LISTS, st.integers(1, 12))
def test_blocks_of_a_stream_are_numbered_by_their_first_line(
    tmp_path: Path, lines: list[bytes], chunk: int
) -> None:
    data = b"\n".join(lines)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(data))
    found = b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_blocks, "CHUNK", chunk)
        for block, line in stream_blocks(describe(str(path), path.stat().st_size, "")):
            assert line == found.count(b"\n")
            found += block
    assert found == data


def test_a_byte_order_mark_is_blanked_so_that_offsets_stay_true(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n{}\n")
    blocks = list(plain_blocks(describe(str(path), 9, ""), 0, 9))
    assert blocks == [(b"   {}\n{}\n", 0)]


def test_a_file_is_one_document_with_its_path_as_id(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    (tmp_path / "sub" / "b.md").write_bytes("h\u00e9".encode())
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    read = read_source(tmp_path)
    assert read.texts == ["one\r\n\r\ntwo\n", "h\u00e9", "packed"]
    assert (read.ids, read.batches) == (["a.txt", "sub/b.md", "sub/c.txt.gz"], 1)


def test_blank_lines_split_a_file_into_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n \n one\nline two\r\n\r\n\r\ntwo\n  \t\n\nthree\n")
    read = read_source(path, separator="blank-lines")
    assert read.texts == [" one\nline two", "two", "three"]
    data = path.read_bytes()
    for (_, place), text in zip(read.places, read.texts, strict=True):
        assert data[place:].startswith(text.encode())


def test_a_separator_splits_a_file_and_empty_pieces_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one<sep>two<sep><sep>three<sep>")
    read = read_source(path, separator="<sep>")
    assert (read.texts, read.reasons) == (["one", "two", "three"], [("empty", 16)])


@settings(max_examples=80)
@given(
    st.lists(
        st.sampled_from(["a", "bc", " ", "\n", "\r\n", "\t", "<s>", "<", "\u00e9"]), max_size=40
    )
)
def test_splitting_in_small_reads_equals_splitting_the_whole(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("txt") / "a.txt"
    path.write_bytes("".join(parts).encode())
    for separator in ("<s>", "blank-lines"):
        whole = read_source(path, separator=separator)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(txt, "_CHUNK", 3)
            small = read_source(path, separator=separator)
        assert (small.texts, small.places) == (whole.texts, whole.places)
        if separator == "<s>":
            pieces = "".join(parts).split("<s>")
            assert whole.texts == [piece for piece in pieces if piece and not piece.isspace()]
        else:
            joined = "".join(whole.texts)
            assert re.sub(r"\s", "", joined) == re.sub(r"\s", "", "".join(parts))


# A file that is no text of its name is called what it is; what is one document is said.
LINES = "".join(f'{{"text": "hello {n}, \u00e9"}}\n' for n in range(30))


ROWS = "text,id\n" + "".join(f"hello {n},{n}\n" for n in range(30))


WRITTEN = {
    "gzip": (lambda data: gzip.compress(data.encode()), ".gz"),
    "zstd": (lambda data: zstandard.compress(data.encode()), ".zst"),
    "xz": (lambda data: lzma.compress(data.encode()), ".xz"),
    "bzip2": (lambda data: bz2.compress(data.encode()), ".bz2"),
    "UTF-16": (lambda data: data.encode("utf-16"), "-f UTF-16 "),
    "UTF-16, little-endian": (lambda data: data.encode("utf-16-le"), "-f UTF-16LE "),
    "UTF-16, big-endian": (lambda data: data.encode("utf-16-be"), "-f UTF-16BE "),
    "UTF-32": (lambda data: data.encode("utf-32"), "-f UTF-32 "),
    "UTF-32, little-endian": (lambda data: data.encode("utf-32-le"), "-f UTF-32LE "),
    "UTF-32, big-endian": (lambda data: data.encode("utf-32-be"), "-f UTF-32BE "),
}


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_what_a_file_is_instead_of_text_is_said_with_what_to_do(
    kind: str, name: str, tiny_tokenizer: Path, tmp_path: Path, olm: Olm
) -> None:
    written, fix = WRITTEN[kind]
    (tmp_path / name).write_bytes(written(ROWS if name == "a.csv" else LINES))
    words = ("tokenize", tmp_path / name, "--tokenizer", tiny_tokenizer, "--dry-run")
    said = olm(*words, "-o", tmp_path / "out")
    assert said.returncode == 4, said.stderr
    assert kind.partition(",")[0] in said.stderr
    assert fix in said.stderr


def test_a_header_of_another_encoding_is_refused_without_a_traceback(
    tiny_tokenizer: Path, tmp_path: Path, olm: Olm
) -> None:
    (tmp_path / "a.csv").write_bytes("text,Gr\u00f6\u00dfe\na,1\n".encode("cp1252"))
    said = olm("tokenize", tmp_path / "a.csv", "--tokenizer", tiny_tokenizer, "-o", tmp_path / "o")
    assert (said.returncode, "header is not UTF-8" in said.stderr) == (4, True)


def test_text_files_that_are_one_document_against_all_likelihood_are_said(tmp_path: Path) -> None:
    for name, text in (("lines", "a line\n" * 5_000), ("short", "a\nb"), ("parted", "a@@b\n" * 9)):
        (tmp_path / f"{name}.txt").write_text(text)
    files = list_files([str(tmp_path)]).files
    (one,) = notes(files, None)
    assert "lines.txt is one document, and has 5,000 lines or more" in one
    assert [said.partition(":")[0] for said in notes(files, "@@")] == ["lines.txt", "short.txt"]
    assert len(notes(files, "blank-lines")) == 3
    assert notes(files * 9, None) == []


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


QUICK = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv"])
def test_every_format_is_read_in_every_compression(tmp_path: Path, name: str, ending: str) -> None:
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
def test_streams_one_after_another_are_one_and_a_cut_one_is_an_error(
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
def test_zero_bytes_after_and_between_compressed_streams_are_no_data(
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


def test_a_file_that_needs_a_dictionary_is_not_called_damaged(tmp_path: Path) -> None:
    samples = [lines([{"text": f"sample {n}"}]) for n in range(2000)]
    known = zstandard.train_dictionary(2000, samples)
    packed = zstandard.ZstdCompressor(dict_data=known).compress(samples[0])
    path = write(tmp_path / "a.jsonl.zst", packed)
    with pytest.raises(InputError, match=r"zstd dictionary, which is not read[\s\S]*zstd -d -D"):
        read_source(path)


def test_one_zero_byte_after_gzip_is_no_data_and_zeros_alone_are_no_gzip(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(lines([{"text": "one"}])) + b"\0")
    assert read_source(path).texts == ["one"]
    path.write_bytes(bytes(1000))
    with pytest.raises(InputError, match="truncated or damaged"):
        read_source(path)


@given(cut=st.lists(st.integers(0, 5), max_size=4), size=st.integers(1, 9), zeros=st.booleans())
@QUICK
def test_gzip_members_are_one_stream_however_it_is_read(
    cut: list[int], size: int, zeros: bool
) -> None:
    members = [bytes(range(n * 40)) for n in cut]
    stored = b"".join(gzip.compress(m) + bytes(3 * zeros) for m in members)
    stream = decompressed(io.BytesIO(stored), "gzip")
    assert b"".join(iter(lambda: stream.read(size), b"")) == b"".join(members)


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_a_bomb_is_refused(tmp_path: Path, ending: str) -> None:
    line = b'{"text": "' + b"x" * (1 << 20) + b'"}\n'
    if ending == ".xz":
        packer = lzma.LZMACompressor(preset=0)
        bomb = b"".join(packer.compress(line) for _ in range(100)) + packer.flush()
    else:
        bomb = PACKED[ending](line * 100)
    path = write(tmp_path / f"a.jsonl{ending}", bomb)
    with pytest.raises(InputError, match="it may be a bomb"):
        read_source(path)


def test_an_xz_frame_that_asks_for_a_gigabyte_is_refused(tmp_path: Path) -> None:
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
