"""Answers: whole and in pieces the same, with offsets that count from what is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from support.small_tokenizer import train
from support.tokenizer_kinds import unigram
from tokenizers import Tokenizer, decoders

from olm_data.errors import ValidationError
from olm_train.extensions.generate.engine import Scored, TextRequest
from olm_train.extensions.serve.protocol import ChatAnswer, CompletionAnswer, ParsedRequest
from olm_train.extensions.serve.worker import NewText


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(str(train(tmp_path_factory.mktemp("answers") / "tokenizer.json")))


def pieces_of(tokenizer: Tokenizer, texts: Sequence[str], number: int = 0) -> list[NewText]:
    found, tokens = [], 0
    for place, text in enumerate(texts):
        ids = tokenizer.encode(text).ids
        tokens += len(ids)
        scores = tuple(Scored(token, -1.0, ((token, -1.0), (7, -2.0))) for token in ids)
        last = place == len(texts) - 1
        found.append(NewText(number, text, tokens, scores, (), "stop" if last else None))
    return found


def asked(*prompts: tuple[int, ...], echo: bool = False) -> ParsedRequest:
    requests = tuple(TextRequest(prompt=prompt, logprobs=2) for prompt in prompts)
    return ParsedRequest(requests, ("p",) * len(prompts), (False,) * len(prompts), echo)


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_lead_to_the_tokens_of_the_text(tokenizer: Tokenizer, echo: bool) -> None:
    prompt = tuple(tokenizer.encode("p").ids)
    made = [CompletionAnswer(asked(prompt, echo=echo), tokenizer, "i", 1, "m") for _ in "ab"]
    pieces = pieces_of(tokenizer, ["ab c", "d🙂", "e"])
    if echo:
        head = tuple(Scored(token, None, ()) for token in prompt)
        pieces[0] = NewText(0, pieces[0].text, pieces[0].tokens, pieces[0].scores, head, None)
    for piece in pieces:
        made[0].take(piece)
    (whole,) = made[0].whole()["choices"]
    assert whole["text"] == ("p" if echo else "") + "ab cd🙂e"
    logprobs = whole["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        name = token.replace("Ġ", " ")
        assert whole["text"].startswith(name, offset) or whole["text"][offset] == "🙂"
    assert all(len(top or {}) in (0, 1, 2) for top in logprobs["top_logprobs"])
    events = list(made[1].events(iter(pieces), usage=True))
    parts = [choice for event in events for choice in event["choices"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]
    assert [part["finish_reason"] for part in parts] == [None, None, "stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == made[0].whole()["usage"]


def test_a_part_of_a_character_is_called_by_its_name(tokenizer: Tokenizer) -> None:
    answer = CompletionAnswer(asked((5,)), tokenizer, "i", 1, "m")
    for piece in pieces_of(tokenizer, ["🙂"]):
        answer.take(piece)
    (choice,) = answer.whole()["choices"]
    assert len(set(choice["logprobs"]["tokens"])) == 4
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0]


def test_answers_of_one_prompt_count_it_once(tokenizer: Tokenizer) -> None:
    prompt = (5, 6, 7)
    answer = ChatAnswer(asked(prompt, prompt), tokenizer, "i", 1, "m")
    pieces = [*pieces_of(tokenizer, ["ab"]), *pieces_of(tokenizer, ["c", "d"], number=1)]
    events = list(answer.events(iter(pieces), usage=False))
    roles = [choice["delta"] for choice in events[0]["choices"]]
    assert roles == [{"content": "", "role": "assistant"}]
    whole = answer.whole()
    assert whole["usage"]["prompt_tokens"] == 3
    said = [choice["message"] for choice in whole["choices"]]
    assert [each["content"] for each in said] == ["ab", "cd"]
    first = whole["choices"][0]["logprobs"]["content"][0]
    assert bytes(first["bytes"]).decode() == first["token"]
    assert math.isclose(first["top_logprobs"][1]["logprob"], -2.0)


def test_logits_that_are_no_numbers_are_no_answer(tokenizer: Tokenizer) -> None:
    answer = ChatAnswer(asked((5,)), tokenizer, "i", 1, "m")
    with pytest.raises(ValidationError, match="non-finite"):
        answer.take(NewText(0, "", 0, (), (), "non-finite"))


@pytest.mark.parametrize("text", ["ab 🙂🙂 cd", " the é"])
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer, text: str, kind: str) -> None:
    if kind == "byte-fallback":
        tokenizer = Tokenizer.from_str(unigram(byte_fallback=True).decode())
        space = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()
        tokenizer.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    scores = tuple(Scored(i, -1.0, ((i, -1.0),)) for i in ids)
    answer = ChatAnswer(asked((5,)), tokenizer, "i", 1, "m")
    answer.take(NewText(0, text, len(ids), scores, (), "length"))
    (choice,) = answer.whole()["choices"]
    content = choice["logprobs"]["content"]
    for each in (content, [one["top_logprobs"][0] for one in content]):
        assert b"".join(bytes(one["bytes"]) for one in each).decode().strip() == text.strip()
