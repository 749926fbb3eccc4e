"""Bodies of requests: what of OpenAI's API is known, and what each field becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.small_tokenizer import train
from tokenizers import Tokenizer

from olm_data.bounded_json import MalformedJson, decode
from olm_data.errors import UsageError
from olm_train.extensions.generate.loaded import PromptIds
from olm_train.extensions.generate.sampling import MAX_SEED, Sampling
from olm_train.extensions.generate.template import ChatTemplate
from olm_train.extensions.serve.protocol import ChatBody, CompletionBody, chat, completion


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
