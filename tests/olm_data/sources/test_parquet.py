"""Parquet: row groups that are left unread, batches bounded by bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.inputs import write_rows
from support.reading import read_source

from olm_data.errors import InputError


def test_batches_are_bounded_by_bytes_in_a_row_group_of_unequal_texts(tmp_path: Path) -> None:
    texts = ["x" * n for n in (5, 6_000_000, 5, 3_000_000, 3_000_000, 5)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    read = read_source(tmp_path / "a.parquet")
    assert list(map(len, read.texts)) == list(map(len, texts))
    assert [p for _, p in read.places] == list(range(6))


ROWS: list[dict[str, Any]] = [
    {
        "id": f"r{k}",
        "text": f"document {k}",
        "score": None if k % 7 == 0 else k / 4,
        "language": ["en", "de", None][k % 3],
        "good": k % 2 == 0,
    }
    for k in range(60)
]


def test_row_groups_without_a_match_are_passed_over_unread(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path, ".parquet", [row | {"score": float(k)} for k, row in enumerate(ROWS)]
    )
    footer = pq.ParquetFile(path).metadata
    with open(path, "r+b") as file:  # no page of the first five groups can be read any more
        file.seek(4)
        file.write(b"\xff" * (footer.row_group(5).column(0).dictionary_page_offset - 4))
    read = read_source(path, where="score >= 40", target_bytes=1)
    assert [position for _, position in read.places] == list(range(40, 60))
    assert read.skipped == {"filtered": 40}


def test_the_text_is_not_read_where_the_condition_leaves_nothing(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path, ".parquet", [row | {"score": float(k % 5)} for k, row in enumerate(ROWS)]
    )
    footer = pq.ParquetFile(path).metadata
    names = [footer.schema.column(c).path for c in range(footer.num_columns)]
    with open(path, "r+b") as file:
        for group in range(footer.num_row_groups):
            column = footer.row_group(group).column(names.index("text"))
            file.seek(column.dictionary_page_offset)
            file.write(b"\xff" * column.total_compressed_size)
    assert read_source(path, where="score == 2.5").skipped == {"filtered": 60}
    with pytest.raises(InputError):
        read_source(path, where="score == 2")
