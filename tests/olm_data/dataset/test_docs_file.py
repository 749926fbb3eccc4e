"""A file of document rows is checked before it is decoded, and copied out some rows at a time."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olm_data import parquet
from olm_data.dataset import docs
from olm_data.dataset.docs import ROW_GROUP, DocsFile, dense

ROWS = pa.table({"id": ["a", None, "a"], "n": pa.array([1, 2, 3], pa.int32())})


def file_of(rows: pa.Table, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    pq.write_table(rows, file, **{"row_group_size": ROW_GROUP, **options})
    return file


def test_rows_come_out_as_they_went_in() -> None:
    file = DocsFile(file_of(ROWS), 3)
    assert (file.groups, file.schema) == (1, ROWS.schema)
    assert pa.Table.from_batches(dense(file.group(0, ["n", "id"]))).equals(ROWS.select(["n", "id"]))


@pytest.mark.parametrize(
    ("file", "documents", "says"),
    [
        (io.BytesIO(b"PAR1"), 0, "does not end as a parquet file does"),
        (io.BytesIO(b"PAR1" + b"\xff\xff\xff\x7fPAR1"), 0, "footer is larger than it can be"),
        (file_of(ROWS), 4, "3 rows in 1 groups, not 4"),
        (file_of(ROWS, row_group_size=2), 3, "3 rows in 2 groups, not 3"),
        (file_of(pa.table({"a": [[1], [2]]})), 2, "columns of a kind that is never kept"),
        (file_of(pa.table({"a": [b"x"]})), 1, "columns of a kind that is never kept"),
        (file_of(pa.table([[1], [2]], ["a", "a"])), 1, "or two of one name"),
    ],
)
def test_what_our_writer_never_writes_is_refused(
    file: io.BytesIO, documents: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        DocsFile(file, documents)


def test_a_column_that_unpacks_to_too_much_is_refused_before_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = DocsFile(file_of(pa.table({"a": ["x" * 100_000 + str(n) for n in range(50)]})), 50)
    monkeypatch.setattr(parquet, "FREE_BYTES", 1000)
    monkeypatch.setattr(parquet, "MAX_RATIO", 2)
    with pytest.raises(ValueError, match="unpacks to more than 2 times its size"):
        file.group(0, ["a"])


@settings(max_examples=40)
@given(st.lists(st.none() | st.text(max_size=30), max_size=40), st.integers(1, 200))
def test_dense_parts_are_the_rows_and_keep_to_their_size(
    values: list[str | None], most: int
) -> None:
    column = pa.array(values, pa.string()).dictionary_encode()
    rows = pa.table({"a": column, "n": list(range(len(values)))})
    before, docs.DENSE_BYTES = docs.DENSE_BYTES, most
    try:
        parts = list(dense(rows))
    finally:
        docs.DENSE_BYTES = before
    assert [value for part in parts for value in part.column("a").to_pylist()] == values
    for part in parts:
        size = sum(len((text or "").encode()) for text in part.column("a").to_pylist())
        assert part.num_rows == 1 or size <= most
