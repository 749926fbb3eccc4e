"""Showing: text, ids, borders and origin of documents and rows; nothing in them forges the view."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.rows.reader import RowReader
from olm_data.rows.views import DocumentView, LockRows, RowView, view_row
from olm_data.show.documents import Query, show_documents, show_sightings
from olm_data.show.render import render
from olm_data.tokenizer.tokenizer import load_tokenizer

MANIFEST = """\
version: 1
seed: 7
sequence_length: 64
packing: concat
sources:
  a: {data: a}
  b: {data: b}
stages:
  - {name: main, tokens: 640, weights: {a: 1, b: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Two datasets and a lock over them."""
    folder = tmp_path_factory.mktemp("show")
    for name, start in (("a", 0), ("b", 500)):
        source = write_jsonl(folder / f"{name}.jsonl", texts(60, start))
        make_dataset([source], tiny_tokenizer, folder / name, shard_tokens=500, id_column="id")
    (folder / "manifest.yaml").write_text(MANIFEST)
    mix(str(folder / "manifest.yaml"), str(folder / "mixture.lock.json"))
    return folder


def documents(folder: Path, *, most: int | None = None, **query: Any) -> list[DocumentView]:
    return show_documents(Dataset.open(str(folder)), Query(most=most, **query))


def dataset_row(folder: Path, number: int, length: int = 2048) -> RowView:
    dataset = Dataset.open(str(folder))
    return view_row(dataset, dataset.tokenizer, number, length)


def lock_row(lock: str | Path, number: int) -> RowView:
    return LockRows(Lock.read(lock)).view(number)


def test_the_first_documents_are_shown_without_asking(folder: Path) -> None:
    views = documents(folder / "a")
    assert [view.document for view in views] == [0, 1, 2]
    assert [view.text for view in views] == texts(3)


def test_a_document_has_its_text_ids_and_origin(folder: Path, tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    (view,) = documents(folder / "a", address="41")
    assert view.text == texts(60)[41]
    assert view.ids == [*spec.encode(view.text), spec.eos]
    assert (view.id, view.input, view.position_kind) == ("a-41", "a.jsonl", "byte")
    assert (view.eos, view.bos) == (True, False)
    shown = render(view)
    assert "-- document 41  id a-41" in shown
    assert f"a.jsonl, byte {view.position:,}" in shown
    assert "[EOS] end of document" in shown


@pytest.mark.parametrize("number", [60, 10**6])
def test_a_document_that_is_not_there_is_refused_with_the_range(number: int, folder: Path) -> None:
    with pytest.raises(UsageError, match=f"no document {number:,}") as caught:
        documents(folder / "a", address=str(number))
    assert "0 to 59" in str(caught.value.fix)


def test_a_row_of_a_dataset_is_its_tokens_and_the_one_after(folder: Path) -> None:
    dataset = Dataset.open(str(folder / "a"))
    view = dataset_row(folder / "a", 3, 50)
    ids = [i for piece in view.pieces for i in piece.ids]
    assert ids == dataset.read(150, 201).tolist()
    for piece in view.pieces[:-1]:
        assert piece.eos
        assert piece.stop == piece.tokens
    first = view.pieces[0]
    assert dataset.document_span(first.document)[0] + first.start == 150
    with pytest.raises(UsageError, match="no row"):
        dataset_row(folder / "a", 10**6)


def test_a_row_of_the_run_is_what_the_reader_reads(folder: Path) -> None:
    from olm_data.rows.reader import RowReader

    lock = str(folder / "mixture.lock.json")
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
def test_a_packed_row_of_the_run_is_what_the_reader_reads(folder: Path, packing: str) -> None:
    manifest = folder / f"{packing}.yaml"
    manifest.write_text(MANIFEST.replace("concat", packing))
    lock = mix(str(manifest)).path
    for number in range(0, 10, 3):
        view = lock_row(lock, number)
        ids = [i for piece in view.pieces for i in piece.ids]
        batch = RowReader(lock).read(np.array([number]))
        assert len({piece.document for piece in view.pieces}) == len(view.pieces)
        assert batch.tokens[0, : len(ids)].tolist() == ids
        assert batch.labels[0, len(ids) :].tolist() == [-100] * (64 - len(ids))


def test_a_document_of_a_lock_needs_its_source(folder: Path) -> None:
    lock = str(folder / "mixture.lock.json")
    with pytest.raises(UsageError, match="the source of the document is not given") as caught:
        show_sightings(Lock.read(lock), Query(address="0"))
    assert "a, b" in str(caught.value.fix)
    with pytest.raises(UsageError, match="no source 'c'"):
        show_sightings(Lock.read(lock), Query(address="0"), source="c")
    for query, source in (
        (Query(address="0", full=True), "b"),
        (Query(address="b:0", full=True), None),
    ):
        (found,) = show_sightings(Lock.read(lock), query, source=source)
        assert (found.source, found.document.text) == ("b", texts(1, 500)[0])
    with pytest.raises(UsageError, match="no row"):
        lock_row(lock, 10**9)


def test_text_and_ids_cannot_forge_the_view(tiny_tokenizer: Path, tmp_path: Path) -> None:
    text = "a\n-- document 7  id forged\x1b[2J\r\u202e\nend"
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "x\n\x1b[31m", "text": text}) + "\n")
    make_dataset([tmp_path / "a.jsonl"], tiny_tokenizer, tmp_path / "out", id_column="id")
    shown = render(documents(tmp_path / "out", address="0")[0])
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "\u202e" not in shown
    assert [line for line in shown.split("\n") if line.startswith("--")] == [
        "-- document 0  id x\\n\\x1b[31m"
    ]
    assert "   | -- document 7" in shown


def test_long_text_is_cut_unless_asked_for(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["word " * 1000])
    make_dataset([source], tiny_tokenizer, tmp_path / "out")
    (view,) = documents(tmp_path / "out")
    assert "3,800 more characters" in render(view)
    assert render(view, full=True).count("word") == 1000


def test_json_holds_everything(folder: Path) -> None:
    value = json.loads(json.dumps(dataset_row(folder / "a", 0).to_json()))
    assert value["pieces"][0]["text"] == texts(1)[0]
    assert value["pieces"][0]["position_kind"] == "byte"


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


def test_json_is_data_only_and_can_be_printed(folder: Path) -> None:
    (view,) = documents(folder / "a", address="0")
    value = json.loads(json.dumps(view.to_json()))
    assert "spec" not in value
    assert value["ids"] == view.ids


def test_documents_are_found_by_id_and_a_missing_id_is_refused(folder: Path) -> None:
    (view,) = documents(folder / "a", id="a-41")
    assert (view.document, view.text) == (41, texts(60)[41])
    lock = str(folder / "mixture.lock.json")
    (found,) = show_sightings(Lock.read(lock), Query(id="b-3"), source="b")
    assert found.document.document == 3
    with pytest.raises(UsageError, match=r"no document has the id 'a-\\x1b41'"):
        documents(folder / "a", id="a-\x1b41")


def test_documents_are_found_by_what_they_hold_and_shown_around_it(folder: Path) -> None:
    views = documents(folder / "a", text="lazy dog. word")
    holding = [n for n, text in enumerate(texts(60)) if "lazy dog. word" in text]
    assert [view.document for view in views] == holding[:5]
    assert all("lazy dog. word" in view.text for view in views)
    most = documents(folder / "a", text="lazy dog. word", most=100)
    assert [view.document for view in most] == holding
    with pytest.raises(UsageError, match="no document holds 'lazy cat'"):
        documents(folder / "a", text="lazy cat")
    with pytest.raises(UsageError, match="nothing to search"):
        documents(folder / "a", text="")


def test_a_long_document_is_shown_around_the_hit_only_unless_asked_for(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    text = "word " * 2000 + "needle " + "word " * 2000
    make_dataset([write_jsonl(tmp_path / "a.jsonl", [text])], tiny_tokenizer, tmp_path / "out")
    (view,) = documents(tmp_path / "out", text="needle")
    assert "needle" in view.text
    assert view.stop - view.start < 120
    assert f"tokens {view.start:,} to {view.stop:,} of {view.tokens:,}" in render(view)
    (view,) = documents(tmp_path / "out", text="needle", full=True)
    assert view.text == text


ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("number", range(5))
def test_colours_add_codes_and_nothing_else(number: int, folder: Path) -> None:
    (view,) = documents(folder / "a", address=str(number))
    painted = render(view, colour=True, found="o")
    assert ANSI.sub("", painted) == render(view)
    codes = set(ANSI.findall(painted))
    assert {"\x1b[38;5;16;48;5;153m", "\x1b[38;5;16;48;5;223m", "\x1b[1;97;41m"} <= codes
    assert "\x1b[" not in render(view)
    assert render(view, colour=True, found="o").count("226mo\x1b[0m") == view.text.count("o")


def test_special_tokens_inside_a_document_are_red(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["one <|endoftext|> two"])
    make_dataset([source], tiny_tokenizer, tmp_path / "out", special="allow")
    (view,) = documents(tmp_path / "out", address="0")
    assert "\x1b[1;97;41m<|endoftext|>\x1b[0m" in render(view, colour=True)


def show(*words: object) -> Result:
    return CliRunner().invoke(cli, ["show", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["document", "a", "0", "--id", "x"], "a document is named twice"),
        (["document", "a", "b:0"], "there is no shard 'b'"),
        (["document", "a", "x"], "not the address of a document"),
        (["document", "a", "0", "--of", "b"], "--of is for a mixture"),
        (["search", "a", "fox", "--run", "r"], "--run is for a mixture"),
        (["search", "a", "fox", "--skip", "1:2"], "--skip is for a mixture"),
        (
            ["row", "mixture.lock.json", "--sequence-length", 8],
            "is for a dataset, and the lock has one",
        ),
    ],
)
def test_the_command_refuses_what_has_no_effect(
    folder: Path, words: list[object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    error = show(*words).exception
    assert isinstance(error, UsageError)
    assert message in str(error)


def test_the_command_shows_as_many_as_are_asked_for(folder: Path) -> None:
    done = show("search", folder / "a", "fox", "--first", "2")
    assert done.output.count("-- document") == 2
    assert "there may be more: --first 4" in done.output
    assert "\x1b" not in done.output
    for words, heads in (
        (["document", folder / "a"], ["-- document 0", "-- document 1", "-- document 2"]),
        (["document", folder / "a", 7], ["-- document 7"]),
        (["document", folder / "a", 58, "--first", 5], ["-- document 58", "-- document 59"]),
        (["row", folder / "a", 3, "--sequence-length", 50], ["== row 3"]),
        (["row", folder / "mixture.lock.json", 8, "--first", 9], ["== row 8", "== row 9"]),
    ):
        lines = show(*words).output.splitlines()
        kind = heads[0].rpartition(" ")[0]
        assert [
            line[: len(heads[0])].rstrip(": ") for line in lines if line.startswith(kind)
        ] == heads


def test_a_row_of_a_shorter_phase_is_shown_as_the_rows_it_is_trained_as(folder: Path) -> None:
    manifest = folder / "phases.yaml"
    stage = "  - {name: long, tokens: 640, weights: {a: 1}}\n"
    text = MANIFEST.replace("name: main,", "name: main, sequence_length: 16,")
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
