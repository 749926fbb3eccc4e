"""Documents are found by number, id and text, and shown with where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.extensions.show.documents import Query, show_documents, show_sightings
from olm_data.extensions.show.render import render
from olm_data.mixture.lock import Lock
from olm_data.rows.views import DocumentView, LockRows, RowView
from olm_data.tokenizer.tokenizer import load_tokenizer


def documents(two_sources: Path, *, most: int | None = None, **query: Any) -> list[DocumentView]:
    return show_documents(Dataset.open(str(two_sources)), Query(most=most, **query))


def lock_row(lock: str | Path, number: int) -> RowView:
    return LockRows(Lock.read(lock)).view(number)


def test_the_first_documents_are_shown_without_asking(two_sources: Path) -> None:
    views = documents(two_sources / "a")
    assert [view.document for view in views] == [0, 1, 2]
    assert [view.text for view in views] == texts(3)


def test_a_document_has_its_text_ids_and_origin(two_sources: Path, tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    (view,) = documents(two_sources / "a", address="41")
    assert view.text == texts(60)[41]
    assert view.ids == [*spec.encode(view.text), spec.eos]
    assert (view.id, view.input, view.position_kind) == ("a-41", "a.jsonl", "byte")
    assert (view.eos, view.bos) == (True, False)
    shown = render(view)
    assert "-- document 41  id a-41" in shown
    assert f"a.jsonl, byte {view.position:,}" in shown
    assert "[EOS] end of document" in shown


@pytest.mark.parametrize("number", [60, 10**6])
def test_a_document_that_is_not_there_is_refused_with_the_range(
    number: int, two_sources: Path
) -> None:
    with pytest.raises(UsageError, match=f"no document {number:,}") as caught:
        documents(two_sources / "a", address=str(number))
    assert "0 to 59" in str(caught.value.fix)


def test_a_document_of_a_lock_needs_its_source(two_sources: Path) -> None:
    lock = str(two_sources / "mixture.lock.json")
    with pytest.raises(UsageError, match="the source of the document is not given") as caught:
        show_sightings(LockRows(Lock.read(lock)), Query(address="0"))
    assert "a, b" in str(caught.value.fix)
    with pytest.raises(UsageError, match="no source 'c'"):
        show_sightings(LockRows(Lock.read(lock)), Query(address="0"), source="c")
    for query, source in (
        (Query(address="0", full=True), "b"),
        (Query(address="b:0", full=True), None),
    ):
        (found,) = show_sightings(LockRows(Lock.read(lock)), query, source=source)
        assert (found.source, found.document.text) == ("b", texts(1, 500)[0])
    with pytest.raises(UsageError, match="no row"):
        lock_row(lock, 10**9)


def test_another_tokenizer_beside_the_tokens_is_refused(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(3))
    make_dataset([source], tiny_tokenizer, tmp_path / "out")
    path = tmp_path / "out" / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ValidationError, match="not the one"):
        documents(tmp_path / "out")
    path.unlink()
    with pytest.raises(ValidationError, match="missing"):
        documents(tmp_path / "out")
    with pytest.raises(InputError):
        documents(tmp_path / "nothing")


def test_documents_are_found_by_id_and_a_missing_id_is_refused(two_sources: Path) -> None:
    (view,) = documents(two_sources / "a", id="a-41")
    assert (view.document, view.text) == (41, texts(60)[41])
    lock = str(two_sources / "mixture.lock.json")
    (found,) = show_sightings(LockRows(Lock.read(lock)), Query(id="b-3"), source="b")
    assert found.document.document == 3
    with pytest.raises(UsageError, match=r"no document has the id 'a-\\x1b41'"):
        documents(two_sources / "a", id="a-\x1b41")


def test_documents_are_found_by_what_they_hold_and_shown_around_it(two_sources: Path) -> None:
    views = documents(two_sources / "a", text="lazy dog. word")
    holding = [n for n, text in enumerate(texts(60)) if "lazy dog. word" in text]
    assert [view.document for view in views] == holding[:5]
    assert all("lazy dog. word" in view.text for view in views)
    most = documents(two_sources / "a", text="lazy dog. word", most=100)
    assert [view.document for view in most] == holding
    with pytest.raises(UsageError, match="no document holds 'lazy cat'"):
        documents(two_sources / "a", text="lazy cat")
    with pytest.raises(UsageError, match="nothing to search"):
        documents(two_sources / "a", text="")
