"""Text while it is being written: the pieces are the whole, and no piece is taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_tokenizer import train
from support.tokenizer_kinds import bpe, unigram
from tokenizers import Tokenizer

from olm_train.extensions.generate.text import Stops, TextStream

WORDS = "the cat sat; été 中文 🙂🙃 x"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(str(train(tmp_path_factory.mktemp("text") / "tokenizer.json")))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 299), max_size=30), st.integers(0, 30))
def test_pieces_are_the_text_of_all_ids(byte_level: Tokenizer, ids: list[int], cut: int) -> None:
    ids = [*byte_level.encode(WORDS).ids, *ids]
    prompt, rest = ids[:cut], ids[cut:]
    stream = TextStream(byte_level, prompt)
    pieces = [stream.push(token) for token in rest]
    whole = "".join(pieces) + stream.flush()
    text = byte_level.decode(ids, skip_special_tokens=False)
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    before = byte_level.decode(prompt, skip_special_tokens=False)
    if not before.endswith("\ufffd"):
        assert before + whole == text
    else:
        assert text.endswith(whole)


def test_a_character_is_given_as_a_whole(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level)
    pieces = [stream.push(token) for token in byte_level.encode("a🙂b").ids]
    assert pieces == ["a", "", "", "", "🙂", "b"]


@pytest.mark.parametrize("kind", [bpe, unigram])
def test_other_kinds_of_tokenizers_go_on_as_they_began(kind: object) -> None:
    tokenizer = Tokenizer.from_str(kind().decode())  # type: ignore[operator]
    ids = tokenizer.encode("the cat sat on the mat", add_special_tokens=False).ids
    for cut in range(1, len(ids)):
        stream = TextStream(tokenizer, ids[:cut])
        text = "".join(map(stream.push, ids[cut:])) + stream.flush()
        assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


def test_a_text_ends_before_its_first_stop_string_and_shows_no_part_of_it() -> None:
    stops = Stops(["\nUser:", "END"])
    shown = []
    for piece in ("one\n", "Us", "e me E", "N", "D more\nUser:"):
        stops.push(piece)
        shown.append(stops.text[: stops.certain])
    assert shown == ["one", "one", "one\nUse me ", "one\nUse me ", "one\nUse me "]
    assert (stops.ended, stops.text) == (True, "one\nUse me ")


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_certain_stays(text: str, strings: list[str]) -> None:
    stops, seen = Stops(strings), ""
    for character in text:
        stops.push(character)
        certain = stops.text[: stops.certain]
        assert certain.startswith(seen)
        seen = certain
        if stops.ended:
            break
    places = [text.find(each) for each in strings if each in text]
    expected = text if not places else None
    if expected is not None:
        assert stops.text == expected
    else:
        assert stops.ended
        assert not any(each in stops.text for each in strings)


def test_no_stop_string_holds_nothing_back(tmp_path: Path) -> None:
    stops = Stops([""])
    stops.push("anything")
    assert (stops.certain, stops.ended) == (8, False)
