"""The packings: the rows they make of documents, what they cost, and the plans they leave."""

from __future__ import annotations

import itertools
import mmap
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing import LENGTHS, documents, inputs, peak, rows_of
from support.small_datasets import mix_datasets, random_shards, write_dataset, write_sparse_dataset

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ValidationError
from olm_data.mixture.compile_stages import rows_between
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import compare_packing, mix
from olm_data.order.olmo_core import OlmoCore
from olm_data.order.shuffled import Shuffled
from olm_data.packing import base, row_plan
from olm_data.packing import best_fit as module
from olm_data.packing.base import PackedRows, PackingCost
from olm_data.packing.best_fit import best_fit, fill, pack_best_fit
from olm_data.packing.compare import Comparison
from olm_data.packing.concat import Concat, Instances, StreamRows, row_span, rows_in, unused_tail
from olm_data.packing.document import DocumentPacking
from olm_data.packing.packings import PACKINGS, from_lock
from olm_data.packing.row_plan import RowPlan, info_of, write
from olm_data.rows.reader import RowReader
from olm_data.storage.store import Store

DATASET: Any = SimpleNamespace(digest="0" * 64)


@pytest.mark.parametrize("name", PACKINGS)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=40),
    gap=st.integers(0, 2),
    sequence_length=st.integers(1, 20),
    window=st.integers(1, 9),
)
def test_each_token_is_an_input_once_or_counted_as_dropped(
    name: str, lengths: list[int], gap: int, sequence_length: int, window: int
) -> None:
    sizes = np.array(lengths, np.int64)
    starts = np.cumsum(sizes + gap) - sizes
    windows = (
        (starts[low : low + window], sizes[low : low + window])
        for low in range(0, len(sizes), window)
    )
    cost, rows, inputs = PackingCost(), 0, list[int]()
    of_a_document = {t for a, n in zip(starts, sizes, strict=True) for t in range(a, a + n)}
    for part in PACKINGS[name]().pack(DATASET, windows, sequence_length, cost):
        stops = np.cumsum(part.counts)
        rows += len(part.counts)
        for low, high in zip(stops - part.counts, stops, strict=True):
            row = [
                token
                for start, size in zip(part.starts[low:high], part.lengths[low:high], strict=True)
                for token in range(start, start + size)
            ]
            assert 0 < len(row) <= sequence_length + 1
            assert of_a_document.issuperset(row)
            inputs += row[:sequence_length]
    assert len(set(inputs)) == len(inputs), "an input twice"
    assert (cost.rows, cost.tokens) == (rows, len(inputs))
    assert cost.padding == rows * sequence_length - len(inputs)
    # the last token of a stream may be a label only
    last_label = int(name == "concat" and rows > 0)
    assert cost.dropped == len(of_a_document) - len(inputs) - last_label


def test_a_lock_names_its_packing_and_the_order_of_olmo_core_brings_its_own() -> None:
    for name, packing in PACKINGS.items():
        assert from_lock(name, Shuffled()) == packing()
    order = OlmoCore(batch_rows=4, chunk_rows=2)
    assert from_lock("concat", order) == Instances(chunk_rows=2)
    for wrong in ("best_fit", "unknown", None, 1):
        with pytest.raises(msgspec.ValidationError):
            from_lock(wrong, order)


UNUSED: Any = None


@given(LENGTHS, st.integers(1, 20))
def test_a_document_row_holds_one_document(lengths: list[int], sequence_length: int) -> None:
    rows = rows_of(
        DocumentPacking().pack(UNUSED, [documents(lengths)], sequence_length, PackingCost())
    )
    assert all(len(row) == 1 for row in rows)
    assert [t for row in rows for t in inputs(row, sequence_length)] == list(range(sum(lengths)))
    assert len(rows) == sum(-(-n // sequence_length) for n in lengths)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_rows_of_long_documents_are_made_a_part_at_a_time(
    packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = documents([1 << 18] * 3)  # 49,152 rows

    def packed() -> Iterable[PackedRows]:
        return PACKINGS[packing]().pack(DATASET, [window], 16, PackingCost())

    whole = rows_of(packed())
    monkeypatch.setattr(base, "PART", 1 << 10)
    assert rows_of(packed()) == whole
    assert peak(packed()) < 1 << 18


@given(st.integers(0, 500), st.integers(1, 40))
def test_every_token_but_the_first_and_the_tail_is_a_label_exactly_once(
    tokens: int, length: int
) -> None:
    labels = []
    for row in range(rows_in(tokens, length)):
        start, stop = row_span(row, length)
        assert stop - start == length + 1
        assert stop <= tokens
        labels += range(start + 1, stop)
    assert labels == list(range(1, len(labels) + 1))
    tail = unused_tail(tokens, length)
    assert tail == tokens - (1 + len(labels) if labels else 0)
    assert tail <= length


def test_a_row_needs_one_token_more_than_its_length() -> None:
    assert [rows_in(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=10), st.integers(1, 4096))
def test_rows_of_stages_add_up_to_the_rows_of_the_run(stages: list[int], length: int) -> None:
    ends = list(itertools.accumulate(stages, initial=0))
    rows = [rows_between(a, b, length) for a, b in itertools.pairwise(ends)]
    assert sum(rows) == sum(stages) // length


@given(st.integers(0, 90), st.integers(1, 9), st.integers(0, 89), st.integers(1, 30))
def test_the_rows_with_some_tokens_are_those_that_have_one_of_them_as_an_input(
    tokens: int, length: int, start: int, size: int
) -> None:
    rows = StreamRows(rows_in(tokens, length), length)
    wanted = []
    for row in range(rows.rows):
        ((first, held),) = rows.pieces(row)
        assert (first, first + held) == row_span(row, length)
        if max(first, start) < min(first + length, start + size):
            wanted.append(row)
    assert rows.rows_with(start, start + size).tolist() == wanted


@given(LENGTHS, st.integers(1, 20), st.lists(st.integers(0, 40), max_size=4), st.integers(0, 3))
def test_a_stream_has_the_same_rows_in_any_windows(
    lengths: list[int], sequence_length: int, cuts: list[int], gap: int
) -> None:
    starts, sizes = documents(lengths, gap)
    cost = PackingCost()
    edges = [0, *sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]
    windows = [(starts[a:b], sizes[a:b]) for a, b in itertools.pairwise(edges)]
    rows = rows_of(Concat().pack(UNUSED, windows, sequence_length, cost))
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
    assert cost.dropped == unused_tail(len(stream), sequence_length)


# a length of a row, up to far more than one block of rooms, and pieces that fit into it
ROWS = st.one_of(st.integers(1, 60), st.integers(1, 1 << 13), st.sampled_from([1023, 1024, 2048]))
PIECES = ROWS.flatmap(
    lambda size: st.tuples(st.lists(st.integers(1, size), max_size=60), st.just(size))
)


def one_by_one(lengths: list[int], sequence_length: int) -> list[int]:
    """Best-fit decreasing, a piece at a time: the room left in each row, ascending."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(left, row) for row, left in enumerate(room) if left >= length]
        if fitting:
            room[min(fitting)[1]] -= length
        else:
            room.append(sequence_length - length)
    return sorted(room)


@given(PIECES, st.integers(0, 2**64 - 1))
def test_each_piece_lies_in_one_row_and_no_row_is_overfull(
    pieces: tuple[list[int], int], seed: int
) -> None:
    sizes, sequence_length = np.array(pieces[0], np.int64), pieces[1]
    ties = np.random.default_rng(seed).integers(0, 2**64, len(sizes), dtype=np.uint64)
    rows = best_fit(sizes, ties, sequence_length)
    assert (sorted(rows.order.tolist()), rows.starts[0]) == (list(range(len(sizes))), 0)
    assert rows.starts[-1] == len(sizes)
    spans = zip(rows.starts[:-1], rows.starts[1:], strict=True)
    room = [sequence_length - int(sizes[rows.order[a:b]].sum()) for a, b in spans]
    assert sorted(room) == one_by_one(sizes.tolist(), sequence_length)


@given(PIECES)
def test_ties_choose_documents_and_never_the_shape_of_rows(pieces: tuple[list[int], int]) -> None:
    sizes, sequence_length = np.array(pieces[0], np.int64), pieces[1]
    packed = [
        best_fit(sizes, rng.integers(0, 2**64, len(sizes), np.uint64), sequence_length)
        for rng in map(np.random.default_rng, (0, 1))
    ]
    shapes = [sizes[rows.order].tolist() for rows in packed]
    assert shapes[0] == shapes[1]
    assert packed[0].starts.tolist() == packed[1].starts.tolist()


def test_moves_are_few_however_many_pieces_there_are() -> None:
    counts = np.full(2049, 10**12, np.int64)
    counts[0] = 0
    moves, rows = fill(counts, 2048)
    assert len(moves) < 20_000
    tokens = int((counts * np.arange(2049)).sum())
    assert 0 <= rows * 2048 - tokens < rows * 2048 // 1000


def test_more_pieces_than_a_window_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 4)
    with pytest.raises(ValueError, match="5 pieces"):
        best_fit(np.ones(5, np.int64), np.zeros(5, np.uint64), 8)


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
    assert (cost.cut_long, cost.cut_short) == (sum(n > sequence_length for n in lengths), 0)


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


S = 16
SHARDS = [[5, 3, 9, 24, 1, 1, 6], [1, 1, 1], [40, 8, 8, 8], [2, 30, 1], [7] * 20, [64, 16, 17]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "web"
    shards = random_shards(1, SHARDS)
    write_dataset(path, [[ids + 1 for ids in shard] for shard in shards], vocab_size=50_001)
    return path


def compared(dataset: Path) -> dict[str, Comparison]:
    found = compare_packing(str(dataset), [S], most_documents=None)
    return {one.packing: one for one in found}


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_numbers_are_those_of_the_rows_trained_on(dataset: Path, packing: str) -> None:
    found = compared(dataset)[packing]
    lock = mix_datasets(
        dataset.parent, ["web"], stages=[(4000, {"web": 1})], sequence_length=S, packing=packing
    ).rename(dataset.parent / f"{packing}.lock.json")
    reader = RowReader(Lock.read(lock))
    place = reader.schedule.locate(np.arange(reader.total_rows))
    batch = reader.read(np.flatnonzero(place.epoch == 0))
    real = batch.input_ids > 0  # ids are above 0, so 0 is padding
    assert found.rows == len(batch.input_ids) == reader.lock.sources[0].rows
    assert (found.tokens, found.padding) == (int(real.sum()), pytest.approx(1 - real.mean()))
    assert found.context == pytest.approx(batch.positions[real].mean())
    work = (batch.positions + 1)[real].sum() / (found.rows * S * (S + 1) / 2)
    assert found.attention_saved == pytest.approx(1 - work)
    pieces = [
        len(np.unique(starts[kept])) for starts, kept in zip(batch.doc_start, real, strict=True)
    ]
    assert found.documents_per_row == pytest.approx(np.mean(pieces))


def test_best_fit_cuts_only_what_is_longer_than_a_row(dataset: Path) -> None:
    concat, best = (compared(dataset)[name] for name in ("concat", "best_fit"))
    longer = sum(n > S for shard in SHARDS for n in shard)
    assert (best.cut_needed, best.cut_avoidable, best.dropped) == (longer, 0, 0)
    assert concat.cut_avoidable > 0
    assert concat.context < best.context


def test_each_source_of_a_manifest_is_compared_as_it_would_be_trained_on(dataset: Path) -> None:
    manifest = dataset.parent / "two.yaml"
    manifest.write_text(
        f"version: 1\nsequence_length: {S}\npacking: best_fit\nmin_tail: 4\n"
        "sources: {a: {data: web}, b: {data: web}}\n"
        "stages: [{name: main, tokens: 320, weights: {a: 1, b: 1}}]\n"
    )
    found = compare_packing(str(manifest), most_documents=None)
    assert {(one.dataset, one.packing) for one in found} == set(product("ab", PACKINGS))
    assert {one.sequence_length for one in found} == {S}
    assert all(one.dropped > 0 for one in found if one.packing == "best_fit")
    (path,) = {mix(str(manifest), str(manifest) + ".json", dry_run=True).lock.sources[0].rows}
    assert path == next(one.rows for one in found if one.packing == "best_fit")


def test_a_stored_plan_is_the_plan(tmp_path: Path) -> None:
    starts, sizes = documents([5, 3, 9, 20, 1, 2])
    parts = [
        part
        for a, b in ((0, 3), (3, 6))
        for part in pack_best_fit(starts[a:b], sizes[a:b], 8, key=1, min_tail=1, cost=PackingCost())
    ]
    info = info_of(tmp_path, write(tmp_path, parts), PackingCost(), 0)
    plan = RowPlan.open(Store(tmp_path), info)
    assert [plan.pieces(r) for r in range(plan.rows)] == rows_of(parts)
    for name in ("starts.npy", "lengths.npy", "ends.npy"):
        data = (tmp_path / name).read_bytes()
        for broken in (data[:-1], data[:100], b""):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(ValidationError, match="missing or damaged"):
                RowPlan.open(Store(tmp_path), info)
        (tmp_path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ValidationError, match="its digest is not the one in the lock"):
            RowPlan.open(Store(tmp_path), info)
        RowPlan.open(Store(tmp_path), info, verify="off")
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValidationError, match="bytes, not 136"):
        RowPlan.open(Store(tmp_path), msgspec.structs.replace(info, rows=1))


def test_a_remote_plan_is_mapped_from_a_copy_that_takes_no_space_afterwards(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, sizes = documents([5, 3, 9, 20, 1, 2])
    parts = list(pack_best_fit(starts, sizes, 8, key=1, min_tail=1, cost=PackingCost()))
    made, space = tmp_path / "made", tmp_path / "space"
    made.mkdir()
    space.mkdir()
    info = info_of(made, write(made, parts), PackingCost(), 0)
    store = Store(f"s3://{s3['bucket']}/row-plans/one")
    for name, digest in info.sha256.items():
        store.publish(name, made / name, digest)
    monkeypatch.setattr(tempfile, "tempdir", str(space))
    plan = RowPlan.open(store, info)
    memory = plan.starts
    while isinstance(memory, np.ndarray):
        memory = memory.base
    assert isinstance(memory, mmap.mmap)
    assert list(space.iterdir()) == []
    assert [plan.pieces(r) for r in range(plan.rows)] == rows_of(parts)
    digests = {**info.sha256, "ends.npy": info.sha256["starts.npy"]}
    with pytest.raises(ValidationError, match="its digest is not the one in the lock"):
        RowPlan.open(store, msgspec.structs.replace(info, sha256=digests))
    store.delete("lengths.npy")
    with pytest.raises(ValidationError, match="missing or damaged"):
        RowPlan.open(store, info)


@pytest.mark.parametrize("packing", PACKINGS)
def test_planning_takes_the_same_memory_for_ten_times_the_documents(
    tmp_path: Path, packing: str
) -> None:
    peaks = []
    for shards in (2, 20):
        path = tmp_path / str(shards)
        write_sparse_dataset(path, shards=shards, tokens=1 << 20, documents=1 << 14)
        dataset = Dataset.open(str(path))
        some = row_plan.documents(dataset, window=1 << 14)
        peaks.append(peak(PACKINGS[packing]().pack(dataset, some, 48, PackingCost())))
    assert peaks[1] < 1.1 * peaks[0]


@given(
    shards=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=4),
    window=st.integers(1, 12),
)
@settings(deadline=None, max_examples=20)
def test_windows_hold_all_documents_in_order(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]], window: int
) -> None:
    path = tmp_path_factory.mktemp("some")
    write_dataset(path, [[np.zeros(n, np.int64) for n in shard] for shard in shards])
    found = list(row_plan.documents(Dataset.open(str(path)), window))
    sizes = [n for shard in shards for n in shard]
    assert [int(n) for _, lengths in found for n in lengths] == sizes
    starts = np.cumsum([0, *sizes])[:-1]
    assert [int(n) for first, _ in found for n in first] == starts.tolist()
    assert all(len(lengths) == window for _, lengths in found[:-1])
