"""Documents found, seen by steps, and shown as lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.project import Project
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.extensions.show import documents as peek_find
from olm_data.extensions.show.documents import (
    Hit,
    Query,
    find_id,
    find_text,
    show_documents,
    show_sightings,
)
from olm_data.extensions.show.render import render
from olm_data.extensions.show.steps import Batches, show_step
from olm_data.extensions.show.token_text import token_bytes, token_texts
from olm_data.mixture.lock import Lock
from olm_data.order.steps import StepSizes
from olm_data.rows.views import DocumentView, LockRows, RowView
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer


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
    assert (view.text, view.ids) == (texts(60)[41], [*spec.encode(view.text), spec.eos])
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


def test_another_tokenizer_beside_the_tokens_is_refused(project: Project) -> None:
    source = project.write("a.jsonl", texts(3))
    project.make([source])
    path = project.out / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ValidationError, match="not the one"):
        documents(project.out)
    path.unlink()
    with pytest.raises(ValidationError, match="missing"):
        documents(project.out)
    with pytest.raises(InputError):
        documents(project / "nothing")


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


# Searching: every document that holds the string is found, once, at its first place.
DOCUMENTS = [*texts(30), "aaaaaaaaaab", "ab" * 40, "\u4f60\u597d" * 9, "x", "a", "b"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Dataset:
    folder = tmp_path_factory.mktemp("find")
    source = write_jsonl(folder / "a.jsonl", DOCUMENTS)
    words = {"bos": "<|endoftext|>", "id_column": "id"}
    make_dataset([source], tiny_tokenizer, folder / "out", shard_tokens=200, **words)
    return Dataset.open(str(folder / "out"))


@pytest.fixture(scope="module")
def spec(dataset: Dataset) -> TokenizerSpec:
    return dataset.tokenizer


pieces = st.sampled_from(DOCUMENTS).flatmap(
    lambda text: st.tuples(st.integers(0, len(text) - 1), st.integers(1, 30)).map(
        lambda span: text[span[0] : span[0] + span[1]]
    )
)


@pytest.mark.parametrize(("piece", "limit"), [(1 << 20, 30), (7, 6)])
def test_all_documents_that_hold_a_string_are_found_whatever_the_pieces(
    piece: int, limit: int, dataset: Dataset, spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peek_find, "PIECE_TOKENS", piece)

    @settings(max_examples=25)
    @given(pieces)
    def check(text: str) -> None:
        text = text[:limit].encode()[:limit].decode(errors="ignore") or "a"
        hits = find_text(dataset, text, most=1000)
        assert [hit.document for hit in hits] == [
            n for n, document in enumerate(DOCUMENTS) if text in document
        ]
        for hit in hits:
            tokens = dataset.document(hit.document).tokens
            assert text in spec.decode(tokens[hit.start : hit.stop])
            before = spec.decode(tokens[1 : hit.stop - 1])
            assert text not in before  # the first place, and no token too many

    check()


def test_a_search_ends_when_it_has_enough_and_tells_how_far_it_is(dataset: Dataset) -> None:
    seen: list[tuple[int, int]] = []
    hits = find_text(dataset, "fox", most=2, watch=lambda *n: seen.append(n))
    assert len(hits) == 2
    assert 0 < seen[-1][0] < seen[-1][1] == len(DOCUMENTS)


def test_neither_ends_of_documents_nor_neighbours_are_text(dataset: Dataset) -> None:
    found = find_text(dataset, "<|endoftext|>", most=100)
    assert [hit.document for hit in found] == [
        n for n, text in enumerate(DOCUMENTS) if "<|endoftext|>" in text
    ]
    assert [hit.document for hit in find_text(dataset, "xa", most=9)] == []


def test_ids_are_found_in_every_shard(dataset: Dataset) -> None:
    for number in (0, 17, len(DOCUMENTS) - 1):
        assert find_id(dataset, f"a-{number}", most=5) == [Hit(number)]
    assert find_id(dataset, "nobody", most=5) == []


def test_other_tokenizers_are_searched_by_their_decoded_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"[U]": 0, "red": 1, "fox": 2, "runs": 3, "<eos>": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[U]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["red fox", "fox runs fox runs", "red"])
    make_dataset([source], tmp_path / "tokenizer.json", tmp_path / "out")
    dataset = Dataset.open(str(tmp_path / "out"))
    spec = dataset.tokenizer
    assert token_bytes(spec) is None
    assert find_text(dataset, "fox r", most=5) == [Hit(1, 0, 2)]
    assert find_text(dataset, "red", most=5) == [Hit(0, 0, 1), Hit(2, 0, 1)]
    assert "".join(token_texts(spec, [2, 3, 2], None)) == "fox runs fox"


S = 64


def test_a_part_of_a_step_reads_only_its_rows(lock_of: Callable[[str], Path]) -> None:
    lock = Lock.read(lock_of("concat"))
    view = show_step(Batches(LockRows(lock), batch_sizes=StepSizes.constant(8 * S)), 2, most=3)
    assert [row.row for row in view.rows] == [8, 9, 10]
    assert view.rows_of_step == 8


# Whatever a row shows, the document's sightings name it.
@pytest.mark.parametrize("packing", ["concat", "best_fit", "document"])
def test_a_document_is_seen_by_the_rows_that_hold_it_and_no_other(
    lock_of: Callable[[str], Path], packing: str
) -> None:
    lock = Lock.read(lock_of(packing))
    rows = LockRows(lock)
    expected: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for number in range(lock.total_rows):
        view, place = rows.view(number), 0
        for piece in view.pieces:
            if place < S:  # what stands behind the inputs is a label
                key = (str(view.source), piece.document)
                expected.setdefault(key, []).append((number, piece.start, piece.stop))
            place += piece.stop - piece.start
    seen = 0
    for index, source in enumerate(lock.sources):
        for document in range(0, rows.source(index)[0].documents, 3):
            (found,) = show_sightings(rows, Query(address=f"{source.name}:{document}"))
            assert [(s.row, s.start, s.stop) for s in found.sightings] == expected.get(
                (source.name, document), []
            )
            seen += len(found.sightings)
    assert seen > 100


def test_rows_that_no_step_has_are_said_to_be_skipped_or_left_over(
    lock_of: Callable[[str], Path],
) -> None:
    lock = Lock.read(lock_of("concat"))
    size = lock.total_rows - 1
    batches = Batches(LockRows(lock), batch_sizes=StepSizes.constant(size // 2 * S), skip=[(0, 1)])
    rest = lock.total_rows - 1 - size // 2 * 2
    rows = LockRows(lock)
    states = set()
    for number in (0, lock.total_rows - 1):
        view = rows.view(number)
        (found,) = show_sightings(
            rows, Query(address=f"{view.source}:{view.pieces[0].document}"), batches
        )
        at = [s.row for s in found.sightings].index(number)
        states.add(found.sightings[at].state)
        assert (found.sightings[at].step is None) == (number == 0 or rest > 0)
    assert "skipped" in states


def test_text_and_ids_cannot_forge_the_view(project: Project) -> None:
    text = "a\n-- document 7  id forged\x1b[2J\r\u202e\nend"
    (project / "a.jsonl").write_text(json.dumps({"id": "x\n\x1b[31m", "text": text}) + "\n")
    project.make([project / "a.jsonl"], id_column="id")
    shown = render(documents(project.out, address="0")[0])
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "\u202e" not in shown
    assert [line for line in shown.split("\n") if line.startswith("--")] == [
        "-- document 0  id x\\n\\x1b[31m"
    ]
    assert "   | -- document 7" in shown


def test_long_text_is_cut_unless_asked_for(project: Project) -> None:
    source = project.write("a.jsonl", ["word " * 1000])
    project.make([source])
    (view,) = documents(project.out)
    assert "3,800 more characters" in render(view)
    assert render(view, full=True).count("word") == 1000


def test_a_long_document_is_shown_around_the_hit_only_unless_asked_for(project: Project) -> None:
    text = "word " * 2000 + "needle " + "word " * 2000
    project.make([project.write("a.jsonl", [text])])
    (view,) = documents(project.out, text="needle")
    assert "needle" in view.text
    assert view.stop - view.start < 120
    assert f"tokens {view.start:,} to {view.stop:,} of {view.tokens:,}" in render(view)
    (view,) = documents(project.out, text="needle", full=True)
    assert view.text == text


ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("number", range(5))
def test_colours_add_codes_and_nothing_else(number: int, two_sources: Path) -> None:
    (view,) = documents(two_sources / "a", address=str(number))
    tokenizer = Dataset.open(str(two_sources / "a")).tokenizer
    painted = render(view, tokenizer, found="o")
    assert ANSI.sub("", painted) == render(view)
    codes = set(ANSI.findall(painted))
    assert {"\x1b[38;5;16;48;5;153m", "\x1b[38;5;16;48;5;223m", "\x1b[1;97;41m"} <= codes
    assert "\x1b[" not in render(view)
    assert painted.count("226mo\x1b[0m") == view.text.count("o")


def test_special_tokens_inside_a_document_are_red(project: Project) -> None:
    source = project.write("a.jsonl", ["one <|endoftext|> two"])
    project.make([source], special="allow")
    (view,) = documents(project.out, address="0")
    assert "\x1b[1;97;41m<|endoftext|>\x1b[0m" in render(view, project.open().tokenizer)


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer: Path) -> TokenizerSpec:
    return load_tokenizer(tiny_tokenizer)


@given(ids=st.lists(st.integers(0, 511), max_size=60))
def test_the_texts_of_tokens_make_the_decoded_text_whatever_the_ids(
    ids: list[int], tiny: TokenizerSpec
) -> None:
    table = token_bytes(tiny)
    texts = token_texts(tiny, ids, table)
    assert len(texts) == len(ids)
    assert "".join(texts) == tiny.decode(ids)
    data, ends = table.join(np.array(ids, np.uint16))
    assert len(ends) == len(ids)
    assert data.tobytes().decode(errors="replace") == tiny.decode(ids)


def test_a_character_of_several_tokens_belongs_to_the_last_of_them(tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    ids = spec.encode("a\U0001f600b")
    texts = token_texts(spec, ids, token_bytes(spec))
    assert [text for text in texts if text] == ["a", "\U0001f600", "b"]
    assert len(texts) == 6
