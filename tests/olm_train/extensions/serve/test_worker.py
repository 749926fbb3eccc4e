"""Requests and answers of OpenAI's API, and the thread that writes all of them together."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from support.small_tokenizer import train
from support.talking import save_talker
from support.tokenizer_kinds import unigram
from tokenizers import Tokenizer, decoders

from olm_data.bounded_json import MalformedJson, decode
from olm_data.errors import InputError, ResourceError, UsageError, ValidationError
from olm_train.extensions.generate.engine import Engine, Scored, TextRequest
from olm_train.extensions.generate.loaded import LoadedModel, PromptIds
from olm_train.extensions.generate.runner import Read, TextRunner
from olm_train.extensions.generate.sampling import MAX_SEED, Sampling
from olm_train.extensions.generate.template import ChatTemplate
from olm_train.extensions.generate.text import TextStream
from olm_train.extensions.serve.protocol import (
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    ParsedRequest,
    chat,
    completion,
)
from olm_train.extensions.serve.worker import MAX_WAITING, NewText, TextJob, Worker


@pytest.fixture(scope="module")
def ids_of(tmp_path_factory: pytest.TempPathFactory) -> PromptIds:
    path = train(tmp_path_factory.mktemp("protocol") / "tokenizer.json")
    return PromptIds(Tokenizer.from_file(str(path)), None, 0, 300, "here")


def text_of(ids: Any) -> str:
    return f"<{len(ids)}>"


def completion_of(**fields: Any) -> CompletionBody:
    return decode(msgspec.json.encode(fields), CompletionBody)


def chat_of(**fields: Any) -> ChatBody:
    return decode(msgspec.json.encode(fields), ChatBody)


def test_each_field_of_a_completion_has_its_place(ids_of: PromptIds) -> None:
    asked = completion(
        completion_of(
            model="x", prompt=["cat", "dog"], max_tokens=3, temperature=0.5, top_p=0.9, top_k=7,
            min_p=0.1, repetition_penalty=1.1, n=2, best_of=2, seed=MAX_SEED, stop="z", logprobs=2,
            echo=True, user="u", metadata={"a": "b"}, store=False, suffix="", logit_bias={"3": 0},
            presence_penalty=0, frequency_penalty=0.0,
        ),
        ids_of,
        text_of,
    )  # fmt: skip
    wish = Sampling(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1, seed=MAX_SEED
    )
    seeds = [each.sampling.seed for each in asked.requests]
    assert seeds == [MAX_SEED, 0, MAX_SEED, 0]
    assert asked.requests[0].sampling == wish
    assert asked.requests[2].prompt == ids_of("dog")
    assert {each.stop for each in asked.requests} == {("z",)}
    first = asked.requests[0]
    assert (first.max_new_tokens, first.logprobs, first.score_prompt) == (3, 2, True)
    assert asked.prompts == ("cat", "cat", "dog", "dog")
    assert asked.echo


def test_what_is_left_out_is_openais_default(ids_of: PromptIds) -> None:
    (request,) = completion(completion_of(prompt=[5, 6]), ids_of, text_of).requests
    assert (request.prompt, request.max_new_tokens, request.logprobs) == ((5, 6), 16, None)
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)
    assert not request.score_prompt
    again = completion(completion_of(temperature=None, n=None), ids_of, text_of)
    assert again.begun == (True,)
    assert again.requests[0].sampling.seed != request.sampling.seed
    assert completion(completion_of(top_k=-1), ids_of, text_of).requests[0].sampling.top_k == 0


def test_a_chat_has_room_to_the_end_or_what_it_asks_for(ids_of: PromptIds) -> None:
    said: list[Any] = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]

    def asked(**fields: Any) -> Any:
        body = chat_of(messages=said, **fields)
        return chat(body, ChatTemplate(), ids_of, lambda ids: 50 - len(ids)).requests

    (request,) = asked(stop=["x"])
    assert request.prompt == ids_of("S\n\nUser: ab\nAssistant:")
    assert request.max_new_tokens == 50 - len(request.prompt)
    assert (request.stop, request.logprobs) == (("x", "\nUser:"), None)
    assert asked(max_tokens=4)[0].max_new_tokens == 4
    assert asked(max_tokens=4, max_completion_tokens=5)[0].max_new_tokens == 5
    assert asked(logprobs=True)[0].logprobs == 0
    assert asked(logprobs=True, top_logprobs=3)[0].logprobs == 3
    assert [each.sampling.seed for each in asked(n=2, seed=8)] == [8, 9]
    with pytest.raises(UsageError, match="at least 1"):
        asked(max_tokens=0)
    with pytest.raises(UsageError, match="needs logprobs"):
        asked(top_logprobs=3)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "user", "content": "a", "name": "Ann"}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}},
        {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
        {"messages": [{"role": "user", "content": "a"}], "modalities": ["text", "audio"]},
        {"messages": [{"role": "user", "content": "a"}], "service_tier": "flex"},
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 21},
        {"messages": [{"role": "user", "content": "a"}], "frequency_penalty": 0.5},
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedJson):
        chat_of(**fields)


def test_a_field_that_asks_for_nothing_is_taken(ids_of: PromptIds) -> None:
    said: list[Any] = [{"role": "user", "content": "a"}]
    nothing = {
        "response_format": {"type": "text"}, "tools": [], "functions": [], "tool_choice": "auto",
        "function_call": "none", "parallel_tool_calls": True, "modalities": ["text"],
        "service_tier": "auto", "audio": None, "prediction": None, "web_search_options": None,
        "safety_identifier": "me", "prompt_cache_key": "mine", "logit_bias": {},
    }  # fmt: skip

    def asked(fields: dict[str, Any]) -> Any:
        return chat(chat_of(messages=said, seed=1, **fields), ChatTemplate(), ids_of, len)

    for name, value in nothing.items():
        assert asked({name: value}) == asked({})
        assert asked({name: None}) == asked({})


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


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_talker(tmp_path_factory.mktemp("worker"))
    return LoadedModel.open(str(folder), "latest", print, device=torch.device("cpu"))


def request(seed: int, **options: Any) -> TextRequest:
    return TextRequest(
        prompt=(5 + seed, 6, 7),
        sampling=Sampling(seed=seed),
        **{"max_new_tokens": 12, "logprobs": 0, **options},
    )


def whole(pieces: Sequence[NewText]) -> tuple[str, list[int], str | None]:
    tokens = [score.token for piece in pieces for score in piece.scores]
    return "".join(piece.text for piece in pieces), tokens, pieces[-1].finish


def test_pieces_are_the_texts_that_an_engine_writes_alone(loaded: LoadedModel) -> None:
    alone = loaded.engine().run([request(seed) for seed in range(6)])
    with Worker(loaded.engine(4)) as worker:
        jobs = [worker.submit([request(seed), request(seed + 3)]) for seed in range(3)]
        for seed, job in enumerate(jobs):
            pieces = list(job)
            for number, text in ((0, alone[seed]), (1, alone[seed + 3])):
                own = [piece for piece in pieces if piece.number == number]
                assert whole(own) == (text.text, text.ids, text.finish)
                assert own[-1].tokens == len(text.ids)
                assert len(own) > 3  # not all at the end


def test_a_request_that_cannot_be_answered_says_so_and_leaves_the_others(
    loaded: LoadedModel,
) -> None:
    with Worker(loaded.engine()) as worker:
        good = worker.submit([request(1)])
        bad = worker.submit([request(1), request(2, max_new_tokens=0), TextRequest(prompt=())])
        with pytest.raises(UsageError, match="no token"):
            list(bad)
        assert whole(list(good))[1]
        assert whole(list(worker.submit([request(2)])))[1]


def test_what_nobody_reads_is_given_up(loaded: LoadedModel) -> None:
    with Worker(loaded.engine(1)) as worker:
        first = worker.submit([request(1, max_new_tokens=90)])
        next(iter(first))
        first.drop()
        assert whole(list(worker.submit([request(2, max_new_tokens=2)])))[1]
        with pytest.raises(ResourceError, match="wait"):
            worker.submit([request(1)] * (MAX_WAITING + 1))
        many = worker.submit([request(1, max_new_tokens=90)] * MAX_WAITING)
        many.drop()
        assert whole(list(many)[-1:])[2] == "length"
        assert whole(list(worker.submit([request(3, max_new_tokens=1)])))[1]


def test_its_end_is_told_to_who_waits_and_to_who_asks(loaded: LoadedModel) -> None:
    with Worker(loaded.engine()) as worker:
        job = worker.submit([request(1, max_new_tokens=90)])
    with pytest.raises(ResourceError, match="stopping"):
        list(job)
    with pytest.raises(ResourceError, match="stopping"):
        worker.submit([request(1)])
    assert not [each for each in threading.enumerate() if each.name == "olm-generate"]


class Broken(TextRunner):
    def __init__(self) -> None: ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], reads: Sequence[Read | None] = ()
    ) -> tuple[torch.Tensor, list[Any]]:
        raise RuntimeError("out of memory")

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        raise AssertionError

    def remove(self, row: int) -> None: ...


def test_a_model_that_fails_is_told_too() -> None:
    with Worker(Engine(Broken())) as worker:
        job: TextJob = worker.submit([request(1)])
        with pytest.raises(RuntimeError, match="out of memory"):
            list(job)
        with pytest.raises(ResourceError, match="out of memory"):
            worker.submit([request(1)])


class Pyo3Panic(BaseException): ...


Pyo3Panic.__name__ = "PanicException"


@pytest.mark.parametrize("from_length", [1, 4], ids=["prompt", "text"])
@pytest.mark.parametrize("kind", [ValueError, Pyo3Panic])
def test_a_text_that_cannot_be_written_ends_its_own_request_alone(
    loaded: LoadedModel,
    kind: type[BaseException],
    from_length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = TextStream._decode

    def fails(self: TextStream, ids: Sequence[int]) -> str:
        if 77 in ids and len(ids) >= from_length:
            raise kind("no such id")
        return decode(self, ids)

    expected = loaded.engine().run([request(seed) for seed in range(3)])
    monkeypatch.setattr(TextStream, "_decode", fails)
    with Worker(loaded.engine()) as worker:
        good = [worker.submit([request(seed)]) for seed in range(2)]
        bad = worker.submit([TextRequest(prompt=(5, 6, 77)), request(4)])
        with pytest.raises(InputError, match="no such id"):
            list(bad)
        good.append(worker.submit([request(2)]))
        for job, text in zip(good, expected, strict=True):
            assert whole(list(job)) == (text.text, text.ids, text.finish)
