"""Rows: as arrays that are those of a plain loop, and as views for people."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.forged import flip
from support.small_datasets import (
    mix_datasets,
    random_shards,
    write_dataset,
    write_mixture,
    write_sparse_dataset,
)
from support.tokenizing import TWO_SOURCES, texts

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, ValidationError
from olm_data.extensions.show.render import render
from olm_data.extensions.verify.datasets import verify
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.rows.fields import IGNORED_LABEL, RowBatch, fill_labels, piece_offsets, piece_starts
from olm_data.rows.reader import DatasetRows, RowReader
from olm_data.rows.views import LockRows, RowView, RowViews

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


def fields(tokens: np.ndarray, cuts: list[set[int]], capacity: int):
    """The functions under test on rows whose cuts are given as one set of places a row."""
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    places = [r * length + p for r in range(rows) for p in sorted(cuts[r])]
    flat = np.array(places, dtype=np.int64)
    ids, labels = np.full((2, rows, length), 99, dtype=np.int64)
    fill_labels(tokens, flat, ids, labels)
    offsets = piece_offsets(flat, capacity, rows, length)
    return ids, labels, piece_starts(offsets, length), offsets


def reference(tokens: np.ndarray, cuts: list[set[int]], capacity: int):
    """The definition, token by token."""
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    ids, labels, starts = [[[0] * length for _ in range(rows)] for _ in range(3)]
    offsets = []
    for r in range(rows):
        piece = 0
        for p in range(length):
            if p == 0 or p in cuts[r]:
                piece = p
                offsets.append(r * length + p)
            ids[r][p] = int(tokens[r, p])
            labels[r][p] = IGNORED_LABEL if p + 1 in cuts[r] else int(tokens[r, p + 1])
            starts[r][p] = piece
    offsets += [rows * length] * (capacity + 1 - len(offsets))
    return ids, labels, starts, offsets


@st.composite
def micro_batches(draw):
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    cuts = [draw(st.sets(st.integers(1, length))) for _ in range(rows)]
    dtype = draw(st.sampled_from([np.uint16, np.uint32]))
    seed = draw(st.integers(0, 1000))
    high = np.iinfo(dtype).max
    tokens = np.random.default_rng(seed).integers(0, high, (rows, length + 1), dtype, endpoint=True)
    return tokens, cuts


@given(micro_batches())
def test_fields_equal_the_definition_token_by_token(batch):
    tokens, cuts = batch
    capacity = tokens.size
    for got, wanted in zip(
        fields(tokens, cuts, capacity), reference(tokens, cuts, capacity), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


@given(micro_batches())
def test_offsets_start_at_zero_rise_and_repeat_the_end_only_at_the_tail(batch):
    tokens, cuts = batch
    *_, offsets = fields(tokens, cuts, capacity=tokens.size)
    end = tokens.shape[0] * (tokens.shape[1] - 1)
    steps = np.diff(offsets)
    pieces = np.count_nonzero(steps)
    assert (offsets[0], offsets[-1]) == (0, end)
    assert (steps[:pieces] > 0).all()
    assert (offsets[pieces:] == end).all()


def test_offsets_have_the_same_length_whatever_the_documents_are():
    tokens = np.zeros((2, 9), dtype=np.uint16)
    lengths = {
        len(fields(tokens, cuts, capacity=10)[-1])
        for cuts in ([set(), set()], [{8}, {1, 2, 3}], [{1, 2, 3, 4}, {4, 5, 6, 7}])
    }
    assert lengths == {11}


def test_more_pieces_than_promised_are_refused():
    tokens = np.zeros((1, 9), dtype=np.uint16)
    assert len(fields(tokens, [{2, 4}], capacity=3)[-1]) == 4
    with pytest.raises(ValidationError, match="3 pieces of documents; 2 were promised"):
        fields(tokens, [{2, 4}], capacity=2)


def test_a_cut_given_twice_makes_no_piece_of_length_zero():
    offsets = piece_offsets(np.array([3, 3]), 3, 1, 8)
    assert offsets.tolist() == [0, 3, 8, 8]


def numbered(name: str) -> list[list[np.ndarray]]:
    """Documents whose token ids are 1, 2, 3, ... over the source, so that an id tells its place."""
    following, shards = 1, []
    for lengths in LENGTHS[name]:
        shards.append([])
        for length in lengths:
            shards[-1].append(np.arange(following, following + length, dtype=np.uint32))
            following += length
    return shards


@pytest.fixture(params=["best_fit", "document"])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_mixture(
        tmp_path,
        {name: numbered(name) for name in LENGTHS},
        stages=[(1600, {"web": 2, "code": 1})],
        sequence_length=S,
        dtypes={"code": "uint32"},
        packing=request.param,
    )


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_an_epoch_holds_each_token_once_and_labels_stay_in_their_document(
    packed: Path, parts: int
) -> None:
    reader, width = RowReader(packed), S // parts
    place = reader.schedule.locate(np.arange(reader.total_rows))
    for index, source in enumerate(reader.lock.sources):
        ends = np.cumsum([length for shard in LENGTHS[source.name] for length in shard])
        rows = np.flatnonzero((place.source == index) & (place.epoch == 0))
        assert len(rows) == source.rows
        batch = reader.read(rows, parts)
        assert batch.input_ids.shape == (len(rows) * parts, width)
        seen: list[int] = []
        for ids, labels, starts, positions in zip(
            batch.input_ids.tolist(),
            batch.labels.tolist(),
            batch.doc_start.tolist(),
            batch.positions.tolist(),
            strict=True,
        ):
            real = [i for i in ids if i]
            assert ids == real + [0] * (width - len(real))  # padding is at the end
            seen += real
            document = np.searchsorted(ends, real, side="left").tolist()
            for at, token in enumerate(real):
                ends_here = token in ends
                assert labels[at] == (-100 if ends_here else token + 1)
                first = at == 0 or document[at] != document[at - 1]
                assert starts[at] == (at if first else starts[at - 1])
                assert positions[at] == at - starts[at]
            assert labels[len(real) :] == [-100] * (width - len(real))
            assert starts[len(real) :] == [starts[len(real) - 1]] * (width - len(real))
        assert sorted(seen) == list(range(1, ends[-1] + 1))


def test_any_split_of_rows_into_batches_reads_the_same(packed: Path) -> None:
    reader = RowReader(packed)
    whole = reader.read(np.arange(60))
    windows = reader.prepare(np.arange(60))
    for i, j in ((0, 1), (1, 7), (7, 60)):
        part = windows.read(i, j)
        for name in ("input_ids", "labels", "doc_start", "positions"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[i:j])


def test_document_rows_hold_one_document_each(tmp_path: Path) -> None:
    lock = write_mixture(
        tmp_path,
        {"web": numbered("web")},
        stages=[(400, {"web": 1})],
        sequence_length=S,
        packing="document",
    )
    assert Lock.read(lock).sources[0].max_documents_per_row == 1
    assert (RowReader(lock).read(np.arange(20)).doc_start == 0).all()


def test_the_same_manifest_makes_the_same_plan_and_lock(packed: Path) -> None:
    again = write_mixture(
        packed.parent / "again",
        {name: numbered(name) for name in LENGTHS},
        stages=[(1600, {"web": 2, "code": 1})],
        sequence_length=S,
        dtypes={"code": "uint32"},
        packing=Lock.read(packed).packing.name,
    )
    assert Lock.read(again).digest == Lock.read(packed).digest


def test_verify_finds_a_changed_or_missing_row_plan(packed: Path) -> None:
    plan = Lock.read(packed).sources[1].plan
    path = packed.parent / plan.folder / "lengths.npy"
    flip(path)
    findings = {(f.file, f.field) for f in verify(str(packed)).findings}
    assert (str(path), "sha256") in findings
    path.unlink()
    findings = {(f.file, f.field) for f in verify(str(packed)).findings}
    assert (str(path), "file") in findings


def test_a_plan_that_is_gone_or_cut_is_refused_by_name(packed: Path) -> None:
    source = Lock.read(packed).sources[0]
    path = packed.parent / source.plan.folder / "starts.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValidationError, match=r"starts\.npy"):
        RowReader(packed)
    path.unlink()
    with pytest.raises(ValidationError, match=r"starts\.npy"):
        RowReader(packed)


def dataset_row(two_sources: Path, number: int, length: int = 2048) -> RowView:
    dataset = Dataset.open(str(two_sources))
    return RowViews(dataset, length).view(number)


def lock_row(lock: str | Path, number: int) -> RowView:
    return LockRows(Lock.read(lock)).view(number)


def test_a_row_of_a_dataset_is_its_tokens_and_the_one_after(two_sources: Path) -> None:
    dataset = Dataset.open(str(two_sources / "a"))
    view = dataset_row(two_sources / "a", 3, 50)
    ids = [i for piece in view.pieces for i in piece.ids]
    assert ids == dataset.read(150, 201).tolist()
    for piece in view.pieces[:-1]:
        assert piece.eos
        assert piece.stop == piece.tokens
    first = view.pieces[0]
    assert dataset.document_span(first.document)[0] + first.start == 150
    with pytest.raises(UsageError, match="no row"):
        dataset_row(two_sources / "a", 10**6)


def test_a_row_of_the_run_is_what_the_reader_reads(two_sources: Path) -> None:
    lock = str(two_sources / "mixture.lock.json")
    reader = RowReader(Lock.read(lock))
    for number in range(10):
        view = lock_row(lock, number)
        ids = [i for piece in view.pieces for i in piece.ids]
        assert ids == reader.read(np.array([number])).tokens[0].tolist()
        assert view.stage == "main"
        assert view.source in ("a", "b")
    shown = render(lock_row(lock, 0))
    assert shown.startswith("== row 0: stage main, source ")
    assert shown.count("-- document") == len(lock_row(lock, 0).pieces)


@pytest.mark.parametrize("packing", ["best_fit", "document"])
def test_a_packed_row_of_the_run_is_what_the_reader_reads(two_sources: Path, packing: str) -> None:
    manifest = two_sources / f"{packing}.yaml"
    manifest.write_text(TWO_SOURCES.replace("concat", packing))
    lock = mix(str(manifest)).path
    for number in range(0, 10, 3):
        view = lock_row(lock, number)
        ids = [i for piece in view.pieces for i in piece.ids]
        batch = RowReader(lock).read(np.array([number]))
        assert len({piece.document for piece in view.pieces}) == len(view.pieces)
        assert batch.tokens[0, : len(ids)].tolist() == ids
        assert batch.labels[0, len(ids) :].tolist() == [-100] * (64 - len(ids))


def test_json_holds_everything(two_sources: Path) -> None:
    view = dataset_row(two_sources / "a", 0)
    piece = json.loads(msgspec.json.encode(view))["pieces"][0]
    assert (piece["text"], piece["position_kind"]) == (texts(1)[0], "byte")
    assert piece["ids"] == view.pieces[0].ids


def test_a_row_of_a_shorter_phase_is_shown_as_the_rows_it_is_trained_as(two_sources: Path) -> None:
    manifest = two_sources / "phases.yaml"
    stage = "  - {name: long, tokens: 640, weights: {a: 1}}\n"
    text = TWO_SOURCES.replace("name: main,", "name: main, sequence_length: 16,")
    manifest.write_text(text + stage)
    lock = mix(str(manifest)).path
    reader = RowReader(lock)
    for number, parts in ((0, 4), (9, 4), (10, 1)):
        view = lock_row(lock, number)
        assert view.sequence_length == 64 // parts
        batch = reader.read(np.array([number]), parts)
        ids = [token for piece in view.pieces for token in piece.ids]
        assert ids == batch.tokens[0].tolist()
        # the view's pieces are the pieces training sees; a label of its own has none
        at = np.cumsum([0] + [len(piece.ids) for piece in view.pieces])
        starts = batch.cu_seqlens[batch.cu_seqlens < 64].tolist()
        assert [place for place in at.tolist() if place < 64] == starts
        shown = render(view)
        assert shown.count("== trained as another row: 16 tokens at once") == parts - 1
