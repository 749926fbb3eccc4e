"""What is said over HTTP: the part of OpenAI's completions and chat that a model can answer.

    JSON body -> CompletionBody | ChatBody -> ParsedRequest: a Request for each text -> answer

A field that would change the answer and is not known here is refused, not passed over.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from olm_data.bounded_json import JsonObject
from olm_data.errors import UsageError, ValidationError
from olm_data.tokenizer.byte_alphabet import byte_alphabet
from olm_train.extensions.generate.engine import Scored, TextRequest
from olm_train.extensions.generate.loaded import PromptIds
from olm_train.extensions.generate.sampling import MAX_SEED, Sampling
from olm_train.extensions.generate.template import ChatTemplate, Message
from olm_train.extensions.generate.text import TextStream
from olm_train.extensions.serve.worker import NewText

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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


class MessagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message: text only."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A turn as it is sent; prompts have no place for a name."""

    role: str
    content: str | list[MessagePart] | None = None
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

    requests: tuple[TextRequest, ...]
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
                TextRequest(
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
        TextRequest(
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


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a token that is one byte, of tokenizers that fall back to bytes."""


class _Answers(ABC):
    """Answers of a request.

    Args:
        asked: what was asked for.
        tokenizer: ids to text.
        id, created, model: what clients are told of it.
    """

    whole_object: str
    event_object: str

    def __init__(
        self, asked: ParsedRequest, tokenizer: Tokenizer, id: str, created: int, model: str
    ) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._id, self._created, self._model = id, created, model
        self._pieces: list[list[NewText]] = [[] for _ in asked.requests]

    def take(self, piece: NewText) -> None:
        """Keep a piece.

        Raises:
            ValidationError: the model's logits are no numbers.
        """
        if piece.finish == "non-finite":
            raise ValidationError("the model gives non-finite logits")
        self._pieces[piece.number].append(piece)

    def whole(self) -> JsonObject:
        """Return the answer to a request that is no stream, when all pieces are taken."""
        choices = [self._choice(_joined(pieces), whole=True) for pieces in self._pieces]
        return {**self._say(self.whole_object, *choices), "usage": self._usage()}

    def _begin(self) -> Iterator[JsonObject]:
        """Yield the choices of events that come before the first piece."""
        return iter(())

    @abstractmethod
    def _choice(self, piece: NewText, *, whole: bool) -> JsonObject:
        """Return the choice of a whole text, or of its next piece."""

    def events(self, pieces: Iterable[NewText], *, usage: bool) -> Iterator[JsonObject]:
        """Yield the events of a stream.

        Args:
            pieces: as they come.
            usage: the last event tells how many tokens there were.
        """
        begun = False
        for piece in pieces:
            self.take(piece)
            if not begun:
                yield from (self._say(self.event_object, each) for each in self._begin())
                begun = True
            yield self._say(self.event_object, self._choice(piece, whole=False))
        if usage:
            yield {**self._say(self.event_object), "usage": self._usage()}

    def _usage(self) -> JsonObject:
        requests = self._asked.requests
        # Texts of one prompt have the very same tuple: it counts once.
        prompts = sum(map(len, {id(each.prompt): each.prompt for each in requests}.values()))
        written = sum(pieces[-1].tokens for pieces in self._pieces if pieces)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
        }

    def _say(self, kind: str, *choices: JsonObject) -> JsonObject:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": [*choices],
        }

    def _text(self, token: int) -> str:
        """Return the text of a token as it is within one: some decoders drop a first space."""
        once, twice = (
            self._tokenizer.decode(ids, skip_special_tokens=False) for ids in ([token], [token] * 2)
        )
        return twice[len(once) :] if twice.startswith(once) else once

    def _bytes(self, token: int) -> list[int] | None:
        """Return the bytes of a token, of a part of a character too; None: not known."""
        text = self._text(token)
        if "\ufffd" not in text:
            return list(text.encode())
        name = self._tokenizer.id_to_token(token) or ""
        if one := _BYTE.fullmatch(name):
            return [int(one[1], 16)]
        alphabet = byte_alphabet()
        return [alphabet[c] for c in name] if alphabet.keys() >= set(name) else None

    def _name(self, token: int) -> str:
        """Return the text of a token; of a part of a character its name, which no other has."""
        text = self._text(token)
        return (self._tokenizer.id_to_token(token) or text) if "\ufffd" in text else text


def _joined(pieces: Sequence[NewText]) -> NewText:
    """Return the pieces of a text as one."""
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        scores=tuple(score for piece in pieces for score in piece.scores),
        prompt_scores=tuple(score for piece in pieces for score in piece.prompt_scores),
    )


class CompletionAnswer(_Answers):
    """The answer of `/v1/completions`."""

    whole_object = event_object = "text_completion"

    def __init__(
        self, asked: ParsedRequest, tokenizer: Tokenizer, id: str, created: int, model: str
    ) -> None:
        super().__init__(asked, tokenizer, id, created, model)
        self._streams = [
            TextStream(tokenizer, request.prompt[:begun] if asked.echo else request.prompt)
            for request, begun in zip(asked.requests, asked.begun, strict=True)
        ]
        self._characters = [0] * len(asked.requests)  # of the tokens told so far

    def _choice(self, piece: NewText, *, whole: bool) -> JsonObject:
        asked, number = self._asked, piece.number
        first = whole or len(self._pieces[number]) == 1
        prompt = asked.prompts[number] if asked.echo and first else ""
        logprobs = None
        if asked.requests[number].logprobs is not None:
            told = piece.prompt_scores[asked.begun[number] :]
            logprobs = self._logprobs(number, [*told, *piece.scores])
        return {
            "index": number,
            "text": prompt + piece.text,
            "finish_reason": piece.finish,
            "logprobs": logprobs,
        }

    def _logprobs(self, number: int, scores: Sequence[Scored]) -> JsonObject:
        offsets = []
        for score in scores:
            offsets.append(self._characters[number])
            self._characters[number] += len(self._streams[number].push(score.token))
        tops = [
            {self._name(token): value for token, value in reversed(score.top)} for score in scores
        ]
        return {
            "tokens": [self._name(score.token) for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [
                None if score.logprob is None else top
                for score, top in zip(scores, tops, strict=True)
            ],
            "text_offset": offsets,
        }


class ChatAnswer(_Answers):
    """The answer of `/v1/chat/completions`."""

    whole_object, event_object = "chat.completion", "chat.completion.chunk"

    def _begin(self) -> Iterator[JsonObject]:
        for number in range(len(self._pieces)):
            delta = {"content": "", "role": "assistant"}
            yield {"index": number, "delta": delta, "finish_reason": None, "logprobs": None}

    def _choice(self, piece: NewText, *, whole: bool) -> JsonObject:
        message = {"content": piece.text, **({"role": "assistant"} if whole else {})}
        logprobs = None
        if self._asked.requests[piece.number].logprobs is not None:
            logprobs = {"content": [self._scored(score) for score in piece.scores]}
        return {
            "index": piece.number,
            "message" if whole else "delta": message,
            "finish_reason": piece.finish,
            "logprobs": logprobs,
        }

    def _scored(self, score: Scored) -> JsonObject:
        top = [self._token(*each) for each in score.top]
        return {**self._token(score.token, score.logprob or 0.0), "top_logprobs": top}

    def _token(self, token: int, value: float) -> JsonObject:
        return {"token": self._text(token), "logprob": value, "bytes": self._bytes(token)}
