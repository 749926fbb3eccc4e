"""Row 23: malformed lines are counted drops; a truncated or damaged file is an error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.reading import read_source

from olm_data.errors import InputError

TEXTS = [f"document {k} with some text {k * k}" for k in range(12)]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def parquet(path: Path) -> bytes:
    pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=5)
    return path.read_bytes()


def stream(path: Path) -> bytes:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return path.read_bytes()


WRITERS = {
    "a.jsonl.gz": lambda path: gzip.compress(LINES),
    "a.jsonl.zst": lambda path: zstandard.ZstdCompressor(write_checksum=True).compress(LINES),
    "a.txt.gz": lambda path: gzip.compress(LINES),
    "a.parquet": parquet,
    "a.arrow": stream,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_cut_at_any_byte_is_refused_by_name(tmp_path: Path, name: str) -> None:
    data = WRITERS[name](tmp_path / name)
    (tmp_path / name).write_bytes(data)
    whole = read_source(tmp_path / name)
    assert whole.texts == TEXTS or name == "a.txt.gz"
    for size in range(0, len(data), 1 if len(data) < 500 else 5):
        (tmp_path / name).write_bytes(data[:size])
        with pytest.raises(InputError) as caught:
            read_source(tmp_path / name)
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz"])
def test_a_damaged_compressed_file_is_refused_near_its_byte(tmp_path: Path, name: str) -> None:
    data = bytearray(WRITERS[name](tmp_path / name))
    data[-2] ^= 1  # the checksum
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match="truncated or damaged") as caught:
        read_source(tmp_path / name)
    assert f"near byte {len(data)} of {len(data)}" in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.feather"])
def test_a_file_of_another_kind_than_its_name_says_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LINES)
    with pytest.raises(InputError, match=name):
        read_source(tmp_path / name)


def test_a_zstd_frame_that_wants_a_huge_window_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(LINES) + packer.flush())
    with pytest.raises(InputError, match="memory"):
        read_source(tmp_path / "a.jsonl.zst")


def test_a_plain_file_cut_in_a_line_loses_that_line_only_and_counts_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for size in range(len(LINES) - 60, len(LINES)):
        path.write_bytes(LINES[:size])
        read = read_source(path)
        assert len(read.texts) + len(read.drops) == LINES[:size].rstrip(b"\n").count(b"\n") + 1
        assert {reason for reason, _ in read.reasons} <= {"malformed"}
        assert read.texts == TEXTS[: len(read.texts)]


@settings(max_examples=100)
@example(noise=b'"olm-mixture-lock', at=1, gone=0)  # no lock, though it has the mark of one
@given(noise=st.binary(max_size=40), at=st.integers(0, len(LINES)), gone=st.integers(0, 30))
def test_noise_in_a_file_never_costs_the_lines_it_does_not_touch(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int, gone: int
) -> None:
    path = tmp_path_factory.mktemp("noise") / "a.jsonl"
    path.write_bytes(LINES[:at] + noise + LINES[at + gone :])
    read = read_source(path)
    before = LINES[:at].count(b"\n")
    after = LINES[at + gone :].count(b"\n") - 1
    assert read.texts[:before] == TEXTS[:before]
    if after > 0:
        assert read.texts[-after:] == TEXTS[-after:]
