"""Each document goes to one reader in each epoch, in an order that can be gone on from anywhere."""

from __future__ import annotations

import json
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given as examples
from hypothesis import settings
from support.hub_corpora import CHECKS
from support.hub_stub import HubStub, write_fineweb_edu
from support.texts import documents_of, given, spelled, write_texts

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, UsageError
from olm_data.extensions.text_stream import documents
from olm_data.extensions.text_stream import documents as module
from olm_data.extensions.text_stream.documents import (
    DocumentStream,
    ReaderState,
    ReadingOrder,
    Slot,
    TokenWindow,
    WindowStream,
    local_corpus,
    row_of,
)
from olm_data.rows.reader import DatasetRows
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer
from olm_data.verbs import tokenize


@pytest.fixture(scope="session")
def spec(tiny_tokenizer: Path) -> TokenizerSpec:
    return load_tokenizer(tiny_tokenizer)


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=12)


SEEDS = st.none() | st.integers(0, 3)


@settings(max_examples=40)
@examples(sizes=SIZES, seed=SEEDS, ranks=st.integers(1, 3), workers=st.integers(1, 3))
def test_the_workers_of_all_ranks_are_given_each_document_once_in_each_epoch(
    tmp_path_factory: pytest.TempPathFactory,
    spec: TokenizerSpec,
    sizes: list[int],
    seed: int | None,
    ranks: int,
    workers: int,
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    texts = write_texts(folder, sizes)
    corpus, order = local_corpus(folder, spec), ReadingOrder(seed=seed, buffer=5)
    slots = ranks * workers
    for epoch in range(3):
        dealt = [given(corpus, Slot(n, slots), order, epoch) for n in range(slots)]
        assert sorted(text for some in dealt for text in some) == sorted(texts)


@pytest.mark.parametrize(("slots", "seed"), [(1, 4), (2, None), (5, None), (5, 4)])
def test_reading_goes_on_from_each_document(
    tmp_path: Path, spec: TokenizerSpec, seed: int | None, slots: int
) -> None:
    write_texts(tmp_path, [9, 1, 30, 4, 2, 8, 8, 8, 1])
    (tmp_path / "part-004.jsonl").write_text('{"text": ""}\n{"text": "x"}\nno json\n')
    corpus, order, slot = (
        local_corpus(tmp_path, spec),
        ReadingOrder(seed=seed, buffer=7),
        Slot(0, slots),
    )
    whole = DocumentStream(corpus, slot, order, 1)
    made = list(whole)
    assert len(made) > 10
    for k, document in enumerate(made):
        place = msgspec.json.decode(msgspec.json.encode(document.place), type=documents.EpochPlace)
        rest = DocumentStream(corpus, slot, order, 1, place)
        assert [ids.tolist() for _, ids in rest] == [ids.tolist() for _, ids in made[k:]]
        assert rest.counts == whole.counts


def test_many_files_are_dealt_whole_and_few_by_document(
    tmp_path: Path, spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path, [6] * 8)
    corpus = local_corpus(tmp_path, spec)
    opened: list[int] = []
    read = type(corpus).batches
    monkeypatch.setattr(
        type(corpus), "batches", lambda self, unit: opened.append(unit.input) or read(self, unit)
    )
    two = given(corpus, Slot(1, 2), ReadingOrder())
    assert opened == [1, 3, 5, 7]
    assert [text[:13] for text in two[5:7]] == ["file 1 text 5", "file 3 text 0"]
    opened.clear()
    three = given(corpus, Slot(1, 3), ReadingOrder())
    assert opened == list(range(8))
    assert [text[:13] for text in three[:3]] == ["file 0 text 1", "file 0 text 4", "file 1 text 0"]


def test_a_shuffle_moves_files_and_documents_and_differs_between_epochs_and_seeds(
    tmp_path: Path, spec: TokenizerSpec
) -> None:
    texts = write_texts(tmp_path, [40, 40, 40])
    corpus = local_corpus(tmp_path, spec)

    def order(seed: int | None, epoch: int, buffer: int = 40) -> list[str]:
        return given(corpus, Slot(), ReadingOrder(seed=seed, buffer=buffer), epoch)

    assert order(None, 0) == order(None, 1) == texts
    assert order(1, 0) == order(1, 0)
    several = [tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(several)) == 4
    by_file = [[text.split()[1] for text in order(1, epoch)] for epoch in range(4)]
    assert len({tuple(files[::40]) for files in by_file}) > 1, "files are shuffled"
    assert {len(set(files[:40])) for files in by_file} == {1}, "a buffer holds what is together"
    assert len({text.split()[1] for text in order(1, 0, 120)[:40]}) > 1, "a larger one holds more"


def test_a_block_of_long_documents_ends_by_bytes(
    tmp_path: Path, spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path, [20])
    monkeypatch.setattr(documents, "BLOCK_BYTES", 50)
    corpus = local_corpus(tmp_path, spec)
    shuffled = given(corpus, Slot(), ReadingOrder(seed=0))
    assert sorted(shuffled) == sorted(texts)
    places = [doc.place.document for doc in DocumentStream(corpus, Slot(), ReadingOrder(seed=0), 0)]
    assert len(set(places)) > 5


def test_what_is_dropped_is_counted_once_by_all_readers_together(
    tmp_path: Path, spec: TokenizerSpec
) -> None:
    write_texts(tmp_path, [10])
    lines = [
        '{"text": ""}',
        "broken",
        '{"text": null}',
        '{"text": "\\ud800"}',
        json.dumps({"text": "good"}),
    ]
    (tmp_path / "more.jsonl").write_text("\n".join(lines) + "\n")
    corpus = local_corpus(tmp_path, spec)
    for slots in (1, 2, 3):
        readers = [DocumentStream(corpus, Slot(n, slots), ReadingOrder(), 0) for n in range(slots)]
        texts = [spelled(spec, doc.ids) for reader in readers for doc in reader]
        assert len(texts) == 11
        total = sum((reader.counts for reader in readers), start=type(readers[0].counts)())
        assert total == {
            "records": 15,
            "documents": 11,
            "empty": 1,
            "malformed": 1,
            "no_text": 1,
            "invalid_utf8": 1,
        }


# A corpus is a value: cut by its inputs alone, sent to processes, known by a digest.
def test_a_large_file_is_cut_into_units_that_hold_all_of_it(
    tmp_path: Path, spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path, [60])
    monkeypatch.setattr(module, "LEAST_UNIT", 200)
    monkeypatch.setattr(module, "UNITS", 1 << 40)
    corpus = local_corpus(tmp_path, spec)
    assert len(corpus.units) > 5
    assert given(corpus, Slot(), ReadingOrder()) == texts
    dealt = [given(corpus, Slot(n, 2), ReadingOrder()) for n in range(2)]
    assert sorted(dealt[0] + dealt[1]) == sorted(texts)


def test_it_is_the_same_in_another_process(tmp_path: Path, spec: TokenizerSpec) -> None:
    texts = write_texts(tmp_path, [3])
    corpus = local_corpus(tmp_path, spec)
    assert given(corpus, Slot(), ReadingOrder()) == texts  # its encoder is made
    again = pickle.loads(pickle.dumps(corpus))
    assert again == corpus
    assert given(again, Slot(), ReadingOrder()) == texts


def test_the_digest_tells_whether_other_tokens_would_come(
    tmp_path: Path, spec: TokenizerSpec, tiny_tokenizer: Path
) -> None:
    write_texts(tmp_path / "a", [3, 4])
    digest = local_corpus(tmp_path / "a", spec).digest
    shutil.copytree(tmp_path / "a", tmp_path / "copy" / "a")
    assert local_corpus(tmp_path / "copy" / "a", spec).digest == digest
    other = load_tokenizer(tiny_tokenizer, eos="none")
    assert local_corpus(tmp_path / "a", other).digest != digest
    with (tmp_path / "a" / "part-001.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert local_corpus(tmp_path / "a", spec).digest != digest


def test_the_encoder_asked_for_is_proved_and_gives_the_same(
    tmp_path: Path, spec: TokenizerSpec
) -> None:
    texts = write_texts(tmp_path, [20])
    fast = local_corpus(tmp_path, spec, encoder="gigatoken")
    assert fast.encoder == "gigatoken"
    assert given(fast, Slot(), ReadingOrder()) == texts
    with pytest.raises(UsageError, match="no encoder"):
        local_corpus(tmp_path, spec, encoder="quickest")


def test_files_without_a_byte_are_no_text(tmp_path: Path, spec: TokenizerSpec) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(InputError):
        local_corpus(tmp_path, spec)


# Corpora of the hub, through its real clients against a stub on loopback.
@pytest.mark.slow
def test_corpora_of_the_hub(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_fineweb_edu(tmp_path / "hub")
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        # the clients read the address of the hub when they are imported, so once a process
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            for check in CHECKS:
                pool.submit(check, texts, stub.root, tiny_tokenizer).result()


def test_files_of_ones_own_are_taken_as_tokenize_takes_them(
    tmp_path: Path, spec: TokenizerSpec, tiny_tokenizer: Path
) -> None:
    texts = write_texts(tmp_path / "a", [3, 3])
    files = sorted((tmp_path / "a").iterdir())
    assert given(local_corpus([str(files[1])], tiny_tokenizer), Slot(), ReadingOrder()) == texts[3:]
    (tmp_path / "b.txt").write_text("one\n\n\ntwo\n")
    (tmp_path / "notes.pdf").write_text("x")
    cut = local_corpus(tmp_path / "b.txt", str(tiny_tokenizer), separator="blank-lines")
    assert given(cut, Slot(), ReadingOrder()) == ["one", "two"]
    table = tmp_path / "c.parquet"
    pq.write_table(pa.table({"body": ["x y"], "text": ["z"]}), table)
    assert given(local_corpus(table, spec, text_column="body"), Slot(), ReadingOrder()) == ["x y"]


# Windows hold every token of a reader in order, and go on from the state behind any of them.
LENGTH = 24


@pytest.mark.parametrize(
    ("length", "slots", "seed"),
    [(1, 1, None), (1, 3, 3), (7, 1, 3), (7, 3, None), (24, 1, None), (24, 3, 3)],
)
def test_windows_are_the_documents_end_to_end_and_cuts_their_borders(
    tmp_path: Path, spec: TokenizerSpec, length: int, slots: int, seed: int | None
) -> None:
    write_texts(tmp_path, [5, 9, 2])
    corpus, order = local_corpus(tmp_path, spec), ReadingOrder(seed=seed, buffer=4)
    for number in range(slots):
        slot = Slot(number, slots)
        stream = np.concatenate([doc.ids for doc in DocumentStream(corpus, slot, order, 0)])
        windows = WindowStream(corpus, length, slot, order, ReaderState())
        made = list(windows)
        assert len(made) == (len(stream) - 1) // length
        for k, window in enumerate(made):
            wanted = stream[k * length : (k + 1) * length + 1]
            assert (window.number, window.tokens.tolist()) == (k, wanted.tolist())
            ends = [len(some) for some in documents_of(wanted[:-1], spec.eos or 0)]
            assert window.cuts.tolist() == np.cumsum(ends)[:-1].tolist()
        assert windows.counted.left_over == len(stream) - 1 - len(made) * length
        assert windows.counted.windows == len(made)
        assert windows.state.ended


@pytest.mark.parametrize(("slots", "seed"), [(1, None), (4, 3)])
def test_each_state_goes_on_with_the_windows_that_would_have_come(
    tmp_path: Path, spec: TokenizerSpec, slots: int, seed: int | None
) -> None:
    write_texts(tmp_path, [5, 9, 2, 30])
    (tmp_path / "long.txt").write_text("one long document " * 60)
    corpus, order, slot = (
        local_corpus(tmp_path, spec),
        ReadingOrder(seed=seed, buffer=6),
        Slot(0, slots),
    )
    whole = WindowStream(corpus, LENGTH, slot, order, ReaderState(epoch=2))
    states, made = [whole.state], list[TokenWindow]()
    for window in whole:
        made.append(window)
        states.append(whole.state)
    states.append(whole.state)
    for k, state in enumerate(states):
        stored = msgspec.json.decode(msgspec.json.encode(state), type=ReaderState)
        rest = WindowStream(corpus, LENGTH, slot, order, stored)
        again = list(rest)
        assert [w.tokens.tolist() for w in again] == [w.tokens.tolist() for w in made[k:]]
        assert [w.cuts.tolist() for w in again] == [w.cuts.tolist() for w in made[k:]]
        if not stored.ended:
            assert (rest.counted, rest.state) == (whole.counted, whole.state)


def test_rows_are_those_of_a_dataset_of_the_same_text(
    tmp_path: Path, spec: TokenizerSpec, tiny_tokenizer: Path
) -> None:
    write_texts(tmp_path / "text", [5, 9, 2])
    tokenize(tmp_path / "text", tokenizer=tiny_tokenizer, output=tmp_path / "tokens", workers=1)
    dataset = DatasetRows(Dataset.open(str(tmp_path / "tokens")), LENGTH)
    windows = list(
        WindowStream(
            local_corpus(tmp_path / "text", spec), LENGTH, Slot(), ReadingOrder(), ReaderState()
        )
    )
    assert len(windows) == dataset.total_rows - 1, "the last row there is padded"
    for k, window in enumerate(windows):
        row, shard_row = row_of(window), dataset.read(np.array([k]))
        for name in ("input_ids", "labels", "doc_start", "positions"):
            assert np.array_equal(getattr(row, name), getattr(shard_row, name)), name
        pieces = len(row.cu_seqlens)
        assert row.cu_seqlens.tolist() == shard_row.cu_seqlens[:pieces].tolist()


def test_text_of_which_nothing_is_left_is_an_error(tmp_path: Path, spec: TokenizerSpec) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\nbroken\n')
    with pytest.raises(InputError, match="none of the 2 records is a document") as caught:
        list(
            WindowStream(
                local_corpus(tmp_path, spec), LENGTH, Slot(), ReadingOrder(), ReaderState()
            )
        )
    assert caught.value.why == "empty 1, malformed 1"
