"""Compressed files: every codec, streams one after another, damage, bombs in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inputs import lines, write
from support.reading import read_source, resolve_source

from olm_data.decompress import decompressed
from olm_data.errors import InputError

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
def test_a_bomb_is_refused_in_bounded_memory(tmp_path: Path, ending: str) -> None:
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


def resolve_and_read(path: Path) -> Any:
    from olm_data.sources import plan_units, read_units

    plan = resolve_source([str(path)])
    units = plan_units(0, plan.inputs[0], plan.options, 1 << 30)
    return read_units(plan.inputs, units, plan.options)
