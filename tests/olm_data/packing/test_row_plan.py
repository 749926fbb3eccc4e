"""Row plans: every token of every chosen document, in rows that never mix up where it came from."""

from __future__ import annotations

import itertools
import mmap
import tempfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.datasets import write_sparse_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ValidationError
from olm_data.packing import base
from olm_data.packing import write_plan as windows
from olm_data.packing.base import PackedRows, PackingCost
from olm_data.packing.best_fit import pack_best_fit
from olm_data.packing.concat import StreamPacker, row_span, rows_in
from olm_data.packing.document import pack_documents
from olm_data.packing.packings import PACKINGS
from olm_data.packing.row_plan import RowPlan, write
from olm_data.storage.store import Store

LENGTHS = st.lists(st.integers(1, 40), max_size=40)
Row = list[tuple[int, int]]


def documents(lengths: list[int], gap: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of documents with `gap` tokens of others between them."""
    sizes = np.array(lengths, np.int64)
    return np.cumsum(sizes + gap) - sizes, sizes


def rows_of(parts: Iterable[PackedRows]) -> list[Row]:
    rows: list[Row] = []
    for packed in parts:
        pieces = list(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))
        stops = np.cumsum(packed.counts).tolist()
        rows += [pieces[b - n : b] for b, n in zip(stops, packed.counts.tolist(), strict=True)]
    return rows


def inputs(row: Row, sequence_length: int) -> list[int]:
    """The places of the dataset whose tokens are inputs of a row."""
    return [t for start, size in row for t in range(start, start + size)][:sequence_length]


@given(LENGTHS, st.integers(1, 20), st.integers(0, 3))
def test_best_fit_rows_hold_every_token_once_and_name_the_one_that_follows(
    lengths: list[int], sequence_length: int, gap: int
) -> None:
    starts, sizes = documents(lengths, gap)
    cost = PackingCost()
    packed = pack_best_fit(starts, sizes, sequence_length, key=7, min_tail=1, cost=cost)
    rows = rows_of(packed)
    seen = [t for row in rows for t in inputs(row, sequence_length)]
    places = [t for a, n in zip(starts.tolist(), lengths, strict=True) for t in range(a, a + n)]
    assert sorted(seen) == places
    ends = set((starts + sizes).tolist())
    for row in rows:
        total = sum(size for _, size in row)
        assert total <= sequence_length + 1
        if total == sequence_length + 1:  # one document that goes on
            assert len(row) == 1
            assert row[0][0] + sequence_length not in ends
        else:
            assert all(start + size in ends for start, size in row)
    assert (cost.rows, cost.tokens, cost.dropped) == (len(rows), len(places), 0)
    assert cost.padding == len(rows) * sequence_length - len(places)
    assert cost.cut_long == sum(n > sequence_length for n in lengths)
    assert cost.cut_short == 0


@given(LENGTHS, st.integers(1, 20), st.integers(1, 8))
def test_only_remainders_shorter_than_min_tail_are_dropped_and_counted(
    lengths: list[int], sequence_length: int, min_tail: int
) -> None:
    starts, sizes = documents(lengths, gap=1)
    cost = PackingCost()
    rows = rows_of(
        pack_best_fit(starts, sizes, sequence_length, key=7, min_tail=min_tail, cost=cost)
    )
    seen = sorted(t for row in rows for t in inputs(row, sequence_length))
    kept = []
    for start, size in zip(starts.tolist(), lengths, strict=True):
        tail = size % sequence_length
        cut = tail if size > sequence_length and tail < min_tail else 0
        kept += range(start, start + size - cut)
    assert seen == kept
    assert (cost.tokens, cost.dropped) == (len(kept), sum(lengths) - len(kept))
    assert cost.padding == len(rows) * sequence_length - len(kept)


@given(LENGTHS, st.integers(1, 20))
def test_a_document_row_holds_one_document(lengths: list[int], sequence_length: int) -> None:
    starts, sizes = documents(lengths)
    rows = rows_of(pack_documents(starts, sizes, sequence_length, cost=PackingCost()))
    assert all(len(row) == 1 for row in rows)
    assert [t for row in rows for t in inputs(row, sequence_length)] == list(range(sum(lengths)))
    assert len(rows) == sum(-(-n // sequence_length) for n in lengths)


@given(LENGTHS, st.integers(1, 20), st.lists(st.integers(0, 40), max_size=4), st.integers(0, 3))
def test_a_stream_has_the_same_rows_in_any_windows(
    lengths: list[int], sequence_length: int, cuts: list[int], gap: int
) -> None:
    starts, sizes = documents(lengths, gap)
    cost = PackingCost()
    packer, rows = StreamPacker(sequence_length, cost), []
    edges = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]
    for a, b in itertools.pairwise(edges):
        rows += rows_of(packer.pack(starts[a:b], sizes[a:b]))
    stream = [t for a, n in zip(starts.tolist(), lengths, strict=True) for t in range(a, a + n)]
    wanted = [
        stream[slice(*row_span(r, sequence_length))]
        for r in range(rows_in(len(stream), sequence_length))
    ]
    assert [[t for start, size in row for t in range(start, start + size)] for row in rows] == (
        wanted
    )
    owner = {t: d for d, (a, n) in enumerate(zip(starts.tolist(), lengths, strict=True))
             for t in range(a, a + n)}  # fmt: skip
    for row in rows:  # pieces end where documents end, but for the last of the row
        for (start, size), (following, _) in itertools.pairwise(row):
            assert owner[start + size - 1] != owner[following]
    # cut: the document of a row's last input goes on as the next row's first
    apart = {owner[one[-1]] for one in wanted if owner[one[-2]] == owner[one[-1]]}
    assert cost.cut_long + cost.cut_short == len(apart)
    assert cost.cut_long == sum(lengths[d] > sequence_length for d in apart)


def test_a_stored_plan_is_the_plan(tmp_path: Path) -> None:
    starts, sizes = documents([5, 3, 9, 20, 1, 2])
    parts = [
        part
        for a, b in ((0, 3), (3, 6))
        for part in pack_best_fit(starts[a:b], sizes[a:b], 8, key=1, min_tail=1, cost=PackingCost())
    ]
    rows, pieces = write(tmp_path, parts)
    sha256 = RowPlan.digests(tmp_path)
    plan = RowPlan.open(Store(tmp_path), rows, pieces, sha256)
    assert [plan.pieces(r) for r in range(plan.rows)] == rows_of(parts)
    for name in ("starts.npy", "lengths.npy", "ends.npy"):
        data = (tmp_path / name).read_bytes()
        for broken in (data[:-1], data[:100], b""):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(ValidationError, match="missing or damaged"):
                RowPlan.open(Store(tmp_path), rows, pieces, sha256)
        (tmp_path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ValidationError, match="its digest is not the one in the lock"):
            RowPlan.open(Store(tmp_path), rows, pieces, sha256)
        RowPlan.open(Store(tmp_path), rows, pieces, sha256, verify="off")
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValidationError, match="bytes, not 136"):
        RowPlan.open(Store(tmp_path), 1, pieces, sha256)


def test_a_remote_plan_is_mapped_from_a_copy_that_takes_no_space_afterwards(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, sizes = documents([5, 3, 9, 20, 1, 2])
    parts = list(pack_best_fit(starts, sizes, 8, key=1, min_tail=1, cost=PackingCost()))
    made, space = tmp_path / "made", tmp_path / "space"
    made.mkdir()
    space.mkdir()
    rows, pieces = write(made, parts)
    sha256 = RowPlan.digests(made)
    store = Store(f"s3://{s3['bucket']}/row-plans/one")
    for name, digest in sha256.items():
        store.publish(name, made / name, digest)
    monkeypatch.setattr(tempfile, "tempdir", str(space))
    plan = RowPlan.open(store, rows, pieces, sha256)
    memory = plan.starts
    while isinstance(memory, np.ndarray):
        memory = memory.base
    assert isinstance(memory, mmap.mmap)
    assert list(space.iterdir()) == []
    assert [plan.pieces(r) for r in range(plan.rows)] == rows_of(parts)
    with pytest.raises(ValidationError, match="its digest is not the one in the lock"):
        RowPlan.open(store, rows, pieces, {**sha256, "ends.npy": sha256["starts.npy"]})
    store.delete("lengths.npy")
    with pytest.raises(ValidationError, match="missing or damaged"):
        RowPlan.open(store, rows, pieces, sha256)


def peak(parts: Iterable[PackedRows]) -> int:
    """The most bytes of memory held while rows are taken and let go."""
    tracemalloc.start()
    for _ in parts:
        pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


@pytest.mark.parametrize("packing", PACKINGS)
def test_planning_takes_the_same_memory_for_ten_times_the_documents(
    tmp_path: Path, packing: str
) -> None:
    peaks = []
    for shards in (2, 20):
        path = tmp_path / str(shards)
        write_sparse_dataset(path, shards=shards, tokens=1 << 20, documents=1 << 14)
        dataset = Dataset.open(str(path))
        some = windows.documents(dataset, window=1 << 14)
        peaks.append(peak(PACKINGS[packing]().pack(dataset, some, 48, PackingCost())))
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_rows_of_long_documents_are_made_a_part_at_a_time(
    packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, sizes = documents([1 << 18] * 3)  # 49,152 rows

    def packed() -> Iterable[PackedRows]:
        if packing == "best_fit":
            return pack_best_fit(starts, sizes, 16, key=1, min_tail=1, cost=PackingCost())
        if packing == "document":
            return pack_documents(starts, sizes, 16, cost=PackingCost())
        return StreamPacker(16, PackingCost()).pack(starts, sizes)

    whole = rows_of(packed())
    monkeypatch.setattr(base, "PART", 1 << 10)
    assert rows_of(packed()) == whole
    assert peak(packed()) < 1 << 18
