"""Arrow and Parquet: pages that are what headers say; values to columns and back. Bombs: row 70."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.project import Project

from olm_data.arrow_values import as_mask, as_numpy, numbers, strings
from olm_data.parquet import DICTIONARY, BoundedParquet, Page, pages

VALUES = (
    st.lists(st.integers(-(2**40), 2**40), max_size=300)
    | st.lists(st.text(max_size=20), max_size=300)
    | st.lists(st.none() | st.booleans(), max_size=300)
)


def chunk_of(data: bytes) -> tuple[int, int, int]:
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    starts = [column.dictionary_page_offset, column.data_page_offset]
    first = min(start for start in starts if start)
    return first, column.total_compressed_size, column.total_uncompressed_size


def read(data: bytes, start: int, size: int) -> list[Page]:
    chunk = SimpleNamespace(
        dictionary_page_offset=None, data_page_offset=start, total_compressed_size=size
    )
    return list(pages(io.BytesIO(data), chunk))


@settings(max_examples=40)
@given(VALUES, st.sampled_from(["1.0", "2.0"]), st.sampled_from(["zstd", "snappy", "none"]))
def test_pages_hold_all_values_and_add_up_to_the_chunk(
    values: list[object], version: str, compression: str
) -> None:
    if not values:
        return
    file = io.BytesIO()
    pq.write_table(
        pa.table({"a": values}),
        file,
        data_page_version=version,
        compression=compression,
        data_page_size=64,
    )
    data = file.getvalue()
    start, stored, size = chunk_of(data)
    found = read(data, start, stored)
    assert sum(page.values for page in found if page.kind != 2) == len(values)
    assert sum(page.stored for page in found) <= stored
    assert sum(page.size for page in found) <= size


@pytest.mark.parametrize("size", [10, 5000, 1 << 20])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_size_of_a_dictionary_is_read_from_its_page_header(size: int, version: str) -> None:
    table = pa.table({"text": pa.array([b"x" * size] * 10, pa.binary())})
    for dictionary, wanted in ((True, [size + 4]), (False, [])):  # with a prefix for the length
        file = io.BytesIO()
        pq.write_table(table, file, data_page_version=version, use_dictionary=dictionary)
        start, stored, _ = chunk_of(file.getvalue())
        found = read(file.getvalue(), start, stored)
        assert [page.size for page in found if page.kind == DICTIONARY] == wanted


@given(st.binary(max_size=200), st.integers(0, 400))
def test_no_bytes_do_more_than_be_refused(data: bytes, size: int) -> None:
    try:
        found = read(data, 0, size)
    except ValueError:
        return
    assert all(min(page) >= 0 for page in found)


def test_a_page_that_leads_out_of_its_chunk_is_refused() -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"a": list(range(100))}), file)
    data = file.getvalue()
    start, stored, _ = chunk_of(data)
    with pytest.raises(ValueError, match="leads out of its column"):
        read(data, start, stored - 1)


def test_a_file_may_have_more_row_groups_than_a_page_header_has_items() -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"a": range(1_500)}), file, row_group_size=1)
    found = BoundedParquet(file)
    assert (found.groups, found.group(1_499, ["a"]).to_pydict()) == (1_500, {"a": [1_499]})


@given(st.lists(st.none() | st.text()))
def test_strings_stay_what_they_are(values: list[str | None]) -> None:
    assert strings(values).type == pa.string()
    assert strings(values).to_pylist() == values


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        strings(["\ud800"])


@given(st.lists(st.booleans()))
def test_masks_and_numbers_stay_what_they_are(values: list[bool]) -> None:
    assert as_mask(np.array(values, bool)).to_pylist() == values
    assert numbers(np.array(values, np.int64), pa.int64()).to_pylist() == values


@given(st.lists(st.booleans()), st.integers(0, 20), st.integers(0, 20))
def test_any_part_of_a_column_comes_back_as_an_array(
    values: list[bool], start: int, length: int
) -> None:
    start = min(start, len(values))
    flags = as_mask(np.array(values, bool)).slice(start, length)
    assert as_numpy(flags).tolist() == values[start : start + length]
    whole = numbers(np.arange(len(values), dtype=np.uint64), pa.uint64())
    assert as_numpy(pa.chunked_array([whole, whole])).tolist() == [*range(len(values))] * 2


def test_reading_and_writing_with_ids_imports_no_pandas(repository: Path, project: Project) -> None:
    project.write("a.jsonl", ["one", " ", "two", "three"])
    (project / "b.txt").write_text("four")
    code = f"""
import sys
sys.path.insert(0, {str(repository / "tests")!r})
from pathlib import Path
from support.tokenizing import make_dataset
here = Path({str(project.folder)!r})
make_dataset([here / "a.jsonl", here / "b.txt"], Path({str(project.tokenizer)!r}), here / "out")
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=repository)
