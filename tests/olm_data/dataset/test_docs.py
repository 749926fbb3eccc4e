"""Document rows: bytes that depend on the rows alone, and reading that says what is damaged."""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from olm_data import parquet
from olm_data.dataset import docs
from olm_data.dataset.docs import (
    DOCS,
    ROW_GROUP,
    DocsFile,
    DocsWriter,
    DocumentRows,
    dense,
    docs_schema,
)
from olm_data.errors import ValidationError
from olm_data.storage.store import Store

KEPT = pa.schema([pa.field("score", pa.float64())])
FIXTURE = [HealthCheck.function_scoped_fixture]


def rows(count: int) -> pa.RecordBatch:
    return pa.record_batch(
        [
            [f"id {n}" if n % 3 else None for n in range(count)],
            pa.array([0] * count, pa.int32()),
            list(range(count)),
            [n % 7 for n in range(count)],
            pa.array(range(count), pa.uint64()),
            [n / 2 for n in range(count)],
        ],
        schema=docs_schema(KEPT),
    )


def write(folder: Path, batches: list[pa.RecordBatch], name: str = "shard-00000") -> bytes:
    with DocsWriter(folder / (name + DOCS), docs_schema(KEPT)) as writer:
        for batch in batches:
            writer.append(batch)
    return (folder / (name + DOCS)).read_bytes()


@settings(max_examples=20, suppress_health_check=FIXTURE, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=5))
def test_the_bytes_do_not_depend_on_how_rows_are_handed_over(
    tmp_path: Path, cuts: list[int]
) -> None:
    whole = rows(100)
    edges = [0, *sorted(cuts), 100]
    parts = [whole.slice(a, b - a) for a, b in pairwise(edges)]
    assert write(tmp_path, parts) == write(tmp_path, [whole])


def test_rows_are_found_by_number_across_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.dataset.docs.ROW_GROUP", 32)
    write(tmp_path, [rows(100)])
    read = DocumentRows(Store(str(tmp_path)), "shard-00000", 100)
    for number in (0, 31, 32, 99):
        row = read.row(number)
        assert (row.position, row.columns) == (number, {"score": number / 2})
        assert row.id == (f"id {number}" if number % 3 else None)
    assert read.table(["id", "score"]).num_rows == 100
    assert [batch.num_rows for batch in read.batches(["position"])] == [32, 32, 32, 4]


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.parametrize(
    "reads",
    [
        lambda read: read.row(3),
        lambda read: read.schema(),
        lambda read: read.table(["id"]),
        lambda read: next(iter(read.batches(["id"]))) and gc.collect(),
    ],
)
def test_no_file_stays_open_behind_what_was_read(
    reads: Callable[[DocumentRows], object], tmp_path: Path
) -> None:
    write(tmp_path, [rows(50)])
    read = DocumentRows(Store(str(tmp_path)), "shard-00000", 50)
    reads(read)
    links = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    assert not [at for fd in links if fd.is_symlink() and str(tmp_path) in (at := os.readlink(fd))]
    del read
    gc.collect()  # what was left open would be told of here, and is an error


@pytest.mark.parametrize("damage", ["missing", "cut", "bytes", "other count", "no column"])
def test_damaged_rows_are_an_error_that_names_the_file(tmp_path: Path, damage: str) -> None:
    data = bytearray(write(tmp_path, [rows(50)]))
    path, count = tmp_path / f"shard-00000{DOCS}", 50
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-20])
    elif damage == "bytes":
        data[4:200] = bytes(196)
        path.write_bytes(data)
    elif damage == "other count":
        count = 51
    else:
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"id": ["a"] * 50}), path)
    with pytest.raises(ValidationError, match="shard-00000"):
        DocumentRows(Store(str(tmp_path)), "shard-00000", count).row(3)


def test_an_unfinished_file_is_no_file_of_rows(tmp_path: Path) -> None:
    writer = DocsWriter(tmp_path / f"a{DOCS}", docs_schema(KEPT))
    writer.append(rows(5))
    writer.__exit__(RuntimeError)
    with pytest.raises(ValidationError):
        DocumentRows(Store(str(tmp_path)), "a", 5).row(0)


class Shared(DocumentRows):
    """Another thread asks for a row of another group while this one closes the file."""

    asked = False

    @contextlib.contextmanager
    def _file(self) -> Iterator[DocsFile]:
        with super()._file() as file:
            yield file
        if not self.asked:
            self.asked = True
            assert self.row(70).position == 70


def test_threads_that_ask_for_rows_of_different_groups_get_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.dataset.docs.ROW_GROUP", 32)
    write(tmp_path, [rows(96)])
    assert Shared(Store(tmp_path), "shard-00000", 96).row(5).position == 5


# A file of document rows is checked before it is decoded, and copied out some rows at a time.
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
