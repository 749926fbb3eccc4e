"""Rows of a mixture as arrays: exact tokens, borders from `ends`, damage found, memory recycled."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_datasets import (
    mix_datasets,
    random_shards,
    write_dataset,
    write_mixture,
    write_sparse_dataset,
)

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.rows.fields import RowBatch
from olm_data.rows.reader import DatasetRows, RowReader

LENGTHS = {  # documents longer than a row, of one token, ending on row borders; rows over shards
    "web": [[5, 3, 9, 24, 1, 1, 6], [1, 1, 1], [40, 8, 8, 8], [2, 30, 1]],
    "code": [[7] * 20, [64], [16, 16, 16]],
}
SHARDS = {name: random_shards(i, lengths) for i, (name, lengths) in enumerate(LENGTHS.items())}
S = 8


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(
        tmp_path_factory.mktemp("mixture"),
        SHARDS,
        stages=[(800, {"web": 2, "code": 1}), (400, {"code": 1, "web": 1})],
        sequence_length=S,
        dtypes={"code": "uint32"},
    )


def expected_row(shards: list[list[np.ndarray]], row: int, length: int) -> dict[str, list[int]]:
    """One row of a source token by token, from its list of documents."""
    stream = [
        (token, number)
        for number, document in enumerate(d for shard in shards for d in shard)
        for token in document.tolist()
    ]
    window = stream[row * length : row * length + length + 1]
    starts: list[int] = []
    for place in range(length):
        new = place == 0 or window[place][1] != window[place - 1][1]
        starts.append(place if new else starts[-1])
    here, following = window[:-1], window[1:]
    return {
        "tokens": [token for token, _ in window],
        "input_ids": [token for token, _ in here],
        "labels": [b if m == n else -100 for (_, m), (b, n) in zip(here, following, strict=True)],
        "doc_start": starts,
        "positions": [place - start for place, start in enumerate(starts)],
    }


def assert_batch_is(
    batch: RowBatch, expected: list[dict[str, list[int]]], capacity: int, parts: int = 1
) -> None:
    whole = [
        [t for row in expected[i : i + parts] for t in row["tokens"][:-1]]
        + [expected[i + parts - 1]["tokens"][-1]]
        for i in range(0, len(expected), parts)
    ]
    np.testing.assert_array_equal(batch.tokens, whole)
    for name in ("input_ids", "labels", "doc_start", "positions"):
        wanted = [row[name] for row in expected]
        np.testing.assert_array_equal(getattr(batch, name), wanted, err_msg=name)
    rows, length = batch.input_ids.shape
    offsets = [r * length + p for r in range(rows) for p in sorted(set(expected[r]["doc_start"]))]
    # a row's documents, and those that a cut splits once more
    capacity = rows // parts * (capacity + parts - 1)
    offsets += [rows * length] * (capacity + 1 - len(offsets))
    assert (batch.cu_seqlens.tolist(), batch.max_seqlen) == (offsets, length)


@given(data=st.data())
def test_rows_in_any_order_and_batch_equal_the_documents_token_by_token(
    lock: Path, data: st.DataObject
) -> None:
    reader = RowReader(lock)
    rows = data.draw(
        st.lists(st.integers(0, reader.total_rows - 1), min_size=1, max_size=12), label="rows"
    )
    parts = data.draw(st.sampled_from([1, 1, 2, 4, 8]), label="parts")
    place = reader.schedule.locate(np.array(rows))
    names = [source.name for source in reader.lock.sources]
    # part j of row r is the shorter row r * parts + j of the same stream
    expected = [
        expected_row(SHARDS[names[s]], r * parts + j, S // parts)
        for s, r in zip(place.source.tolist(), place.row.tolist(), strict=True)
        for j in range(parts)
    ]
    batch = reader.read(np.array(rows), parts)
    assert batch.rows.tolist() == [row for row in rows for _ in range(parts)]
    capacity = reader.max_documents_per_row
    assert_batch_is(batch, expected, capacity, parts)
    # the same windows in two pieces, read out of turn
    cut = data.draw(st.integers(0, len(rows) - 1), label="cut")
    windows = reader.prepare(np.array(rows))
    assert_batch_is(windows.read(cut, len(rows), parts), expected[cut * parts :], capacity, parts)
    ids, labels = windows.read_tokens(0, len(rows))
    np.testing.assert_array_equal(ids.ravel(), batch.input_ids.ravel())
    np.testing.assert_array_equal(labels.ravel(), batch.labels.ravel())


def test_every_field_has_the_promised_dtype_and_shape(lock: Path) -> None:
    reader = RowReader(lock)
    batch = reader.read(np.arange(3))
    fields = ("rows", "tokens", "input_ids", "labels", "doc_start", "positions", "cu_seqlens")
    arrays = {name: getattr(batch, name) for name in fields}
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "rows": ("int64", (3,)),
        "tokens": ("uint32", (3, S + 1)),  # the widest of the sources
        "input_ids": ("int64", (3, S)),
        "labels": ("int64", (3, S)),
        "doc_start": ("int32", (3, S)),
        "positions": ("int32", (3, S)),
        "cu_seqlens": ("int32", (3 * reader.max_documents_per_row + 1,)),
    }


def test_borders_come_from_ends_even_where_the_eos_id_stands_inside_text(tmp_path: Path) -> None:
    eos = 7
    document = np.array([1, eos, 2, eos, eos, 3, 4, eos], np.uint32)
    write_dataset(tmp_path / "d", [[document, document, document]], eos=eos)
    batch = DatasetRows(Dataset.open(str(tmp_path / "d")), 16).read(np.arange(1))
    assert np.flatnonzero(batch.labels == -100).tolist() == [7, 15]
    assert batch.cu_seqlens[:3].tolist() == [0, 8, 16]


def test_a_row_outside_the_schedule_is_refused_with_its_bounds(lock: Path) -> None:
    reader = RowReader(lock)
    for row in (-1, reader.total_rows):
        with pytest.raises(UsageError, match=f"has rows 0 to {reader.total_rows - 1}"):
            reader.read(np.array([0, row]))


def test_more_documents_in_a_row_than_the_lock_promises_are_refused(lock: Path) -> None:
    reader = RowReader(lock)
    cut = next(r for r in range(reader.total_rows) if reader.read(np.array([r])).doc_start.any())
    reader.max_documents_per_row = 1
    with pytest.raises(ValidationError, match="1 were promised"):
        reader.read(np.array([cut]))


def test_evaluation_rows_label_each_token_but_the_first_of_a_document_once(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", SHARDS["web"])
    dataset = Dataset.open(str(tmp_path / "d"))
    flat = dataset.read(0, dataset.tokens)
    starts = {dataset.document_span(n)[0] for n in range(dataset.documents)}
    for length in (1, 5, S, dataset.tokens - 1, dataset.tokens, 3 * dataset.tokens):
        rows = DatasetRows(dataset, length)
        batch = rows.read(np.arange(rows.total_rows + 2))
        labels = batch.labels.reshape(-1)[: dataset.tokens - 1]
        wanted = [-100 if p in starts else int(flat[p]) for p in range(1, dataset.tokens)]
        assert labels.tolist() == wanted
        assert (batch.labels.reshape(-1)[dataset.tokens - 1 :] == -100).all()
        assert batch.rows.tolist() == [*range(rows.total_rows), -1, -1]


def test_rows_that_eos_begins_label_each_token_once_after_the_one_before_it(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", SHARDS["web"])
    dataset, eos = Dataset.open(str(tmp_path / "d")), 3
    flat = dataset.read(0, dataset.tokens).tolist()
    starts = [dataset.document_span(n)[0] for n in range(dataset.documents)]
    for length in (1, 5, S, dataset.tokens - 1, dataset.tokens, 3 * dataset.tokens):
        rows = DatasetRows(dataset, length, eos)
        for parts in ([*range(rows.total_rows + 2)], [rows.total_rows - 1], [0, 0]):
            batch = rows.read(np.array(parts))
            for k, row in enumerate(parts):
                places = range(row * length, min((row + 1) * length, dataset.tokens))
                assert batch.labels[k, : len(places)].tolist() == [flat[p] for p in places]
                assert (batch.labels[k, len(places) :] == -100).all()
                inputs = [flat[p - 1] if p else eos for p in places]
                assert batch.input_ids[k, : len(places)].tolist() == inputs
                begins = [max([row * length, *(s for s in starts if s <= p)]) for p in places]
                wanted = [p - begin for p, begin in zip(places, begins, strict=True)]
                assert batch.positions[k, : len(places)].tolist() == wanted


def test_memory_of_a_batch_is_reused_only_when_no_view_of_it_is_left(lock: Path) -> None:
    reader = RowReader(lock)
    first = reader.read(np.arange(4))
    kept, copy = first.labels[2:], first.labels[2:].copy()
    place = first.input_ids.ctypes.data
    del first
    gc.collect()
    second = reader.read(np.arange(4, 8))  # the view of the first one is still held
    np.testing.assert_array_equal(kept, copy)
    assert second.input_ids.ctypes.data != place
    del kept
    gc.collect()
    third = reader.read(np.arange(8, 12))
    assert third.input_ids.ctypes.data == place


def test_reading_needs_neither_torch_nor_arrow(lock: Path) -> None:
    program = (
        "import sys, numpy as np; from olm_data.rows.reader import RowReader;"
        "RowReader(sys.argv[1]).read(np.arange(2)); print({'torch', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(lock)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_a_lock_can_be_given_as_a_path_or_an_object(lock: Path) -> None:
    a, b = RowReader(lock).read(np.arange(5)), RowReader(Lock.read(lock)).read(np.arange(5))
    np.testing.assert_array_equal(a.labels, b.labels)


# Shards are opened on demand, as many as the process may open.
def test_as_many_shards_stay_open_as_the_process_may_open(tmp_path: Path) -> None:
    program = (
        "import resource, sys, numpy as np\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))\n"
        "from olm_data.rows.reader import RowReader\n"
        "reader = RowReader(sys.argv[1])\n"
        "batch = reader.read(np.arange(300))\n"
        "print(batch.labels.shape)\n"
    )
    write_sparse_dataset(tmp_path / "a", shards=100, tokens=300, documents=3)
    write_sparse_dataset(tmp_path / "b", shards=100, tokens=301, documents=3)
    lock = mix_datasets(
        tmp_path, ["a", "b"], stages=[(30_000, {"a": 1, "b": 1})], sequence_length=100
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(lock)], capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout) == ("", "(300, 100)\n")


def test_a_batch_of_a_huge_mixture_opens_only_the_shards_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_sparse_dataset(tmp_path / name, shards=1000, tokens=10**9, documents=1000)
    lock = mix_datasets(
        tmp_path, ["a", "b"], stages=[(10**12, {"a": 1, "b": 1})], sequence_length=2048
    )
    opened = []
    open_shard = Dataset.open_shard
    monkeypatch.setattr(
        Dataset, "open_shard", lambda self, i: opened.append(i) or open_shard(self, i)
    )
    reader = RowReader(lock)
    assert opened == []
    rows = np.arange(16) + reader.total_rows - 16
    batch = reader.read(rows)
    assert 1 < len(opened) <= 16
    # documents of 10^6 tokens: the cuts follow from the place of the row alone
    start = reader.schedule.locate(rows).row * 2048
    cuts = (start[:, None] + np.arange(1, 2049)) % 10**6 == 0
    np.testing.assert_array_equal(batch.labels == -100, cuts)
