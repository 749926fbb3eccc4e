"""How large an input may become: the size of a dictionary is read from its page header."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.sources.limits import dictionary_bytes


@pytest.mark.parametrize("size", [10, 5000, 1 << 20])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_size_of_a_dictionary_is_read_from_its_page_header(
    size: int, version: str, tmp_path: Path
) -> None:
    column = pa.array([b"x" * size] * 10, pa.binary())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path, data_page_version=version)
    place = pq.ParquetFile(path).metadata.row_group(0).column(0).dictionary_page_offset
    assert dictionary_bytes(path.read_bytes()[place : place + 16]) == size + 4  # length prefix
    pq.write_table(pa.table({"text": column}), path, use_dictionary=False)
    place = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    assert dictionary_bytes(path.read_bytes()[place : place + 16]) == 0


@given(header=st.binary(max_size=20))
def test_any_bytes_for_a_page_header_give_a_size(header: bytes) -> None:
    assert dictionary_bytes(header) >= 0
