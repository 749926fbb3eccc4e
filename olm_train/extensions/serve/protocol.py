"""What is said over HTTP: the part of OpenAI's completions and chat that a model can answer.

    JSON body -> CompletionBody | ChatBody -> Asked: a Request for each text -> Answer -> JSON

A field that would change the answer and is not known here is refused, not passed over.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from olm_data.errors import UsageError
from olm_train.extensions.generate.engine import Request
from olm_train.extensions.generate.loaded import PromptIds
from olm_train.extensions.generate.sampling import MAX_SEED, Sampling
from olm_train.extensions.generate.template import ChatTemplate, Message

MAX_TEXTS = 256
"""Texts of a request."""
MAX_TOP = 20
"""Likely tokens that are told with each."""

Zero = Annotated[float, Meta(ge=0, le=0)]
Nothing = Annotated[list[object], Meta(max_length=0)]
Count = Annotated[int, Meta(ge=1, le=MAX_TEXTS)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]
Top = Annotated[int, Meta(ge=0, le=MAX_TOP)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the last event of a stream tells how many tokens there were."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of an answer that is asked for: plain text."""

    type: Literal["text"]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds.

    Attributes:
        top_k, min_p, repetition_penalty: as in `Sampling`; not OpenAI's: clients send them as
            `extra_body`.
        frequency_penalty, presence_penalty, logit_bias: known, and of no effect but at 0.
        user, metadata, store, service_tier, safety_identifier, prompt_cache_key: passed over, they
            change no answer.
    """

    model: str = ""
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    n: Count | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: dict[str, Zero] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling(self) -> Sampling:
        """Return the wishes; without a seed, with one of chance.

        Raises:
            UsageError: a number is out of range.
        """
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k, 0),  # vLLM's -1: all
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed,
        )

    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]] = ""
    max_tokens: Tokens | None = 16
    logprobs: Top | None = None
    echo: bool | None = False
    best_of: Count | None = None
    suffix: Literal[""] | None = None


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message: text only."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A turn as it is sent; prompts have no place for a name."""

    role: str
    content: str | list[Part] | None = None
    name: Literal[""] | None = None

    def plain(self) -> Message:
        """Return it with its text in one piece."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return Message("system" if self.role == "developer" else self.role, content)


class ChatBody(Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`.

    Attributes:
        response_format, modalities: of plain text alone.
        tools, functions, tool_choice, function_call, parallel_tool_calls: of no tools.
        audio, prediction, web_search_options: of nothing.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = False
    top_logprobs: Top | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Nothing | None = None
    functions: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None


class ParsedRequest(msgspec.Struct, frozen=True):
    """The texts of a request, those of a prompt one after another.

    Attributes:
        requests: one for each text.
        prompts: text of each one's prompt.
        begun: a token that the prompt does not spell was put before it.
        echo: the prompt is part of the answer.
    """

    requests: tuple[Request, ...]
    prompts: tuple[str, ...]
    begun: tuple[bool, ...]
    echo: bool


def completion(
    body: CompletionBody, ids_of: PromptIds, text_of: Callable[[Sequence[int]], str]
) -> ParsedRequest:
    """Return what a body asks for.

    Args:
        ids_of: text of a prompt to ids.
        text_of: the way back.

    Raises:
        OlmError: it cannot be answered.
    """
    given = body.prompt
    if isinstance(given, str):
        prompts: list[str | list[int]] = [given]
    elif given and all(isinstance(each, int) for each in given):
        prompts = [[each for each in given if isinstance(each, int)]]
    else:
        prompts = [each for each in given if not isinstance(each, int)]
        if len(prompts) != len(given) or not prompts:
            raise UsageError("a prompt is a text or a list of ids, and there is at least one")
    count = body.n or 1
    if body.best_of not in (None, count):
        raise UsageError("best_of is n or left out", where="best_of")
    if len(prompts) * count > MAX_TEXTS:
        raise UsageError(f"a request is for {MAX_TEXTS} texts at most")
    sampling, most = body.sampling(), 16 if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        raise UsageError("max_tokens is 0 only with echo", where="max_tokens")
    requests, texts, begun = [], [], []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids, text, added = ids_of(prompt), prompt, ids_of.begun(prompt)
        else:
            ids_of.check(prompt)
            ids, text, added = tuple(prompt), text_of(prompt), False
        for number in range(count):
            requests.append(
                Request(
                    prompt=ids,
                    sampling=sampling.after(number),
                    max_new_tokens=most,
                    stop=body.stops(),
                    logprobs=body.logprobs,
                    score_prompt=bool(body.echo) and body.logprobs is not None,
                )
            )
            texts.append(text)
            begun.append(added)
    return ParsedRequest(tuple(requests), tuple(texts), tuple(begun), bool(body.echo))


def chat(
    body: ChatBody,
    template: ChatTemplate,
    ids_of: PromptIds,
    room: Callable[[Sequence[int]], int],
) -> ParsedRequest:
    """Return what a body asks for.

    Args:
        room: tokens that a text after a prompt may have, where the body does not say.

    Raises:
        OlmError: it cannot be answered.
    """
    text = template.prompt([message.plain() for message in body.messages])
    ids = ids_of(text, whole=template.whole)
    most = body.max_completion_tokens
    most = body.max_tokens if most is None else most
    most = room(ids) if most is None else most
    if most == 0:
        raise UsageError("max_completion_tokens is at least 1", where="max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise UsageError("top_logprobs needs logprobs: true", where="top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling()
    requests = tuple(
        Request(
            prompt=ids,
            sampling=sampling.after(number),
            max_new_tokens=most,
            stop=(*body.stops(), *template.stops),
            logprobs=top,
        )
        for number in range(body.n or 1)
    )
    count = len(requests)
    return ParsedRequest(requests, ("",) * count, (False,) * count, False)
