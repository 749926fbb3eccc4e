"""Peeking: text, ids, borders and origin of documents and rows; nothing in them forges the view."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import mix
from olm_data.peek.peek import Wanted, peek
from olm_data.peek.render import render
from olm_data.peek.views import DocumentView, RowView
from olm_data.rows.reader import RowReader
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
    folder = tmp_path_factory.mktemp("peek")
    for name, start in (("a", 0), ("b", 500)):
        source = write_jsonl(folder / f"{name}.jsonl", texts(60, start))
        make_dataset([source], tiny_tokenizer, folder / name, shard_tokens=500, id_column="id")
    (folder / "manifest.yaml").write_text(MANIFEST)
    mix(str(folder / "manifest.yaml"), str(folder / "mixture.lock.json"))
    return folder


def document(view: object) -> DocumentView:
    assert isinstance(view, DocumentView)
    return view


def row(view: object) -> RowView:
    assert isinstance(view, RowView)
    return view


def test_the_first_documents_are_shown_without_asking(folder: Path) -> None:
    views = [document(view) for view in peek(str(folder / "a"), Wanted())]
    assert [view.document for view in views] == [0, 1, 2]
    assert [view.text for view in views] == texts(3)


def test_a_document_has_its_text_ids_and_origin(folder: Path, tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    (view,) = (document(view) for view in peek(str(folder / "a"), Wanted(doc=41)))
    assert view.text == texts(60)[41]
    assert view.ids == [*spec.encode(view.text), spec.eos]
    assert (view.id, view.input, view.position_kind) == ("a-41", "a.jsonl", "byte")
    assert (view.eos, view.bos) == (True, False)
    shown = render(view)
    assert "-- document 41  id a-41" in shown
    assert f"a.jsonl, byte {view.position:,}" in shown
    assert "[EOS] end of document" in shown


@pytest.mark.parametrize("number", [-1, 60])
def test_a_document_that_is_not_there_is_refused_with_the_range(number: int, folder: Path) -> None:
    with pytest.raises(UsageError, match=f"no document {number}") as caught:
        peek(str(folder / "a"), Wanted(doc=number))
    assert "0 to 59" in str(caught.value.fix)


def test_a_row_of_a_dataset_is_its_tokens_and_the_one_after(folder: Path) -> None:
    dataset = Dataset.open(str(folder / "a"))
    (view,) = (row(view) for view in peek(str(folder / "a"), Wanted(row=3, sequence_length=50)))
    ids = [i for piece in view.pieces for i in piece.ids]
    assert ids == dataset.read(150, 201).tolist()
    for piece in view.pieces[:-1]:
        assert piece.eos
        assert piece.stop == piece.tokens
    first = view.pieces[0]
    assert dataset.document_span(first.document)[0] + first.start == 150
    with pytest.raises(UsageError, match="no row"):
        peek(str(folder / "a"), Wanted(row=10**6))


def test_a_row_of_the_run_is_what_the_reader_reads(folder: Path) -> None:
    from olm_data.rows.reader import RowReader

    lock = str(folder / "mixture.lock.json")
    reader = RowReader(Lock.read(lock))
    for number in range(10):
        (view,) = (row(view) for view in peek(lock, Wanted(row=number)))
        ids = [i for piece in view.pieces for i in piece.ids]
        assert ids == reader.read(np.array([number])).tokens[0].tolist()
        assert view.stage == "main"
        assert view.source in ("a", "b")
    assert [row(view).row for view in peek(lock, Wanted())] == [0, 1]
    shown = render(peek(lock, Wanted(row=0))[0])
    assert shown.startswith("== row 0: stage main, source ")
    assert shown.count("-- document") == len(row(peek(lock, Wanted(row=0))[0]).pieces)


@pytest.mark.parametrize("packing", ["best_fit", "document"])
def test_a_packed_row_of_the_run_is_what_the_reader_reads(folder: Path, packing: str) -> None:
    manifest = folder / f"{packing}.yaml"
    manifest.write_text(MANIFEST.replace("concat", packing))
    lock = mix(str(manifest)).path
    for number in range(0, 10, 3):
        (view,) = peek(lock, Wanted(row=number))
        ids = [i for piece in row(view).pieces for i in piece.ids]
        batch = RowReader(lock).read(np.array([number]))
        assert len({piece.document for piece in row(view).pieces}) == len(row(view).pieces)
        assert batch.tokens[0, : len(ids)].tolist() == ids
        assert batch.labels[0, len(ids) :].tolist() == [-100] * (64 - len(ids))


def test_a_document_of_a_lock_needs_its_source(folder: Path) -> None:
    lock = str(folder / "mixture.lock.json")
    with pytest.raises(UsageError, match="the source of the document is not given") as caught:
        peek(lock, Wanted(doc=0))
    assert "a, b" in str(caught.value.fix)
    with pytest.raises(UsageError, match="no source 'c'"):
        peek(lock, Wanted(doc=0, source="c"))
    assert document(peek(lock, Wanted(doc=0, source="b"))[0]).text == texts(1, 500)[0]
    with pytest.raises(UsageError, match="no row"):
        peek(lock, Wanted(row=10**9))


def test_text_and_ids_cannot_forge_the_view(tiny_tokenizer: Path, tmp_path: Path) -> None:
    text = "a\n-- document 7  id forged\x1b[2J\r\u202e\nend"
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "x\n\x1b[31m", "text": text}) + "\n")
    make_dataset([tmp_path / "a.jsonl"], tiny_tokenizer, tmp_path / "out", id_column="id")
    shown = render(peek(str(tmp_path / "out"), Wanted(doc=0))[0])
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
    (view,) = peek(str(tmp_path / "out"), Wanted())
    assert "3,800 more characters" in render(view)
    assert render(view, full=True).count("word") == 1000


def test_json_holds_everything(folder: Path) -> None:
    value = json.loads(json.dumps(row(peek(str(folder / "a"), Wanted(row=0))[0]).to_json()))
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
        peek(str(tmp_path / "out"), Wanted())
    path.unlink()
    with pytest.raises(ValidationError, match="missing"):
        peek(str(tmp_path / "out"), Wanted())
    with pytest.raises(InputError):
        peek(str(tmp_path / "nothing"), Wanted())


def test_json_is_data_only_and_can_be_printed(folder: Path) -> None:
    (view,) = peek(str(folder / "a"), Wanted(doc=0))
    value = json.loads(json.dumps(view.to_json()))
    assert "spec" not in value
    assert value["ids"] == document(view).ids


def test_documents_are_found_by_id_and_a_missing_id_is_refused(folder: Path) -> None:
    (view,) = (document(view) for view in peek(str(folder / "a"), Wanted(id="a-41")))
    assert (view.document, view.text) == (41, texts(60)[41])
    lock = str(folder / "mixture.lock.json")
    (view,) = (document(view) for view in peek(lock, Wanted(id="b-3", source="b")))
    assert view.document == 3
    with pytest.raises(UsageError, match=r"no document with the id 'a-\\x1b41'"):
        peek(str(folder / "a"), Wanted(id="a-\x1b41"))


def test_documents_are_found_by_what_they_hold_and_shown_around_it(folder: Path) -> None:
    views = [document(view) for view in peek(str(folder / "a"), Wanted(search="lazy dog. word"))]
    holding = [n for n, text in enumerate(texts(60)) if "lazy dog. word" in text]
    assert [view.document for view in views] == holding[:5]
    assert all("lazy dog. word" in view.text for view in views)
    most = peek(str(folder / "a"), Wanted(search="lazy dog. word", most=100))
    assert [document(view).document for view in most] == holding
    with pytest.raises(UsageError, match="no document holds 'lazy cat'"):
        peek(str(folder / "a"), Wanted(search="lazy cat"))
    with pytest.raises(UsageError, match="nothing to search"):
        peek(str(folder / "a"), Wanted(search=""))


def test_a_long_document_is_shown_around_the_hit_only_unless_asked_for(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    text = "word " * 2000 + "needle " + "word " * 2000
    make_dataset([write_jsonl(tmp_path / "a.jsonl", [text])], tiny_tokenizer, tmp_path / "out")
    (view,) = (document(v) for v in peek(str(tmp_path / "out"), Wanted(search="needle")))
    assert "needle" in view.text
    assert view.stop - view.start < 120
    assert f"tokens {view.start:,} to {view.stop:,} of {view.tokens:,}" in render(view)
    (view,) = (document(v) for v in peek(str(tmp_path / "out"), Wanted(search="needle", full=True)))
    assert view.text == text


ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("number", range(5))
def test_colours_add_codes_and_nothing_else(number: int, folder: Path) -> None:
    (view,) = peek(str(folder / "a"), Wanted(doc=number))
    painted = render(view, colour=True, found="o")
    assert ANSI.sub("", painted) == render(view)
    codes = set(ANSI.findall(painted))
    assert {"\x1b[38;5;16;48;5;153m", "\x1b[38;5;16;48;5;223m", "\x1b[1;97;41m"} <= codes
    assert "\x1b[" not in render(view)
    assert render(view, colour=True, found="o").count("226mo\x1b[0m") == document(view).text.count(
        "o"
    )


def test_special_tokens_inside_a_document_are_red(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["one <|endoftext|> two"])
    make_dataset([source], tiny_tokenizer, tmp_path / "out", special="allow")
    (view,) = peek(str(tmp_path / "out"), Wanted(doc=0))
    assert "\x1b[1;97;41m<|endoftext|>\x1b[0m" in render(view, colour=True)


def test_the_command_refuses_what_does_not_go_together(folder: Path) -> None:
    for words in (["--doc", "0", "--id", "x"], ["--row", "0", "--first", "3"]):
        done = CliRunner().invoke(cli, ["peek", str(folder / "a"), *words])
        assert isinstance(done.exception, UsageError)
    done = CliRunner().invoke(cli, ["peek", str(folder / "a"), "--search", "fox", "--first", "2"])
    assert done.output.count("-- document") == 2
    assert "there may be more: --first 4" in done.output
    assert "\x1b" not in done.output


def test_a_row_of_a_shorter_phase_is_shown_as_the_rows_it_is_trained_as(folder: Path) -> None:
    manifest = folder / "phases.yaml"
    stage = "  - {name: long, tokens: 640, weights: {a: 1}}\n"
    text = MANIFEST.replace("name: main,", "name: main, sequence_length: 16,")
    manifest.write_text(text + stage)
    lock = mix(str(manifest)).path
    reader = RowReader(lock)
    for number, parts in ((0, 4), (9, 4), (10, 1)):
        view = row(peek(lock, Wanted(row=number))[0])
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
