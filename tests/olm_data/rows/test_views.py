"""Showing: text, ids, borders and origin of documents and rows; nothing in them forges the view."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.tokenizing import TWO_SOURCES, texts

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError
from olm_data.extensions.show.documents import Query, show_documents
from olm_data.extensions.show.render import render
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.rows.reader import RowReader
from olm_data.rows.views import DocumentView, LockRows, RowView, RowViews


def documents(two_sources: Path, *, most: int | None = None, **query: Any) -> list[DocumentView]:
    return show_documents(Dataset.open(str(two_sources)), Query(most=most, **query))


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
    from olm_data.rows.reader import RowReader

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
    value = json.loads(msgspec.json.encode(dataset_row(two_sources / "a", 0)))
    assert value["pieces"][0]["text"] == texts(1)[0]
    assert value["pieces"][0]["position_kind"] == "byte"


def test_json_is_data_only_and_can_be_printed(two_sources: Path) -> None:
    (view,) = documents(two_sources / "a", address="0")
    value = json.loads(msgspec.json.encode(view))
    assert value["ids"] == view.ids


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
