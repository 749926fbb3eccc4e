"""Each document goes to one reader in each epoch, in an order that can be gone on from anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given as examples
from hypothesis import settings
from support.texts import given, spelled, write_texts

from olm_data.extensions.text_stream import documents
from olm_data.extensions.text_stream.documents import (
    DocumentStream,
    ReadingOrder,
    Slot,
    local_corpus,
)
from olm_data.tokenizer.tokenizer import TokenizerSpec

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
