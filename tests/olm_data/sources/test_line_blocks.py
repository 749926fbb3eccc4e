"""Blocks of whole lines: each line in exactly one block, whatever the ranges and reads."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from olm_data.sources import line_blocks
from olm_data.sources.formats import describe
from olm_data.sources.line_blocks import plain_blocks, stream_blocks

LINES = st.lists(st.text("ab \r", max_size=9).map(str.encode), max_size=20)
QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(LINES, st.booleans(), st.lists(st.integers(0, 200), max_size=5), st.integers(1, 12))
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


@QUICK
@given(LINES, st.integers(1, 12))
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
