"""Answers of the server, put together of the pieces of their texts, whole or one by one.

Piece -> take -> ... -> whole()          Piece -> events() -> one JSON object each
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from olm_data.bounded_json import JsonObject
from olm_data.errors import ValidationError
from olm_data.tokenizer.byte_alphabet import byte_alphabet
from olm_train.extensions.generate.engine import Scored
from olm_train.extensions.generate.text import TextStream
from olm_train.extensions.serve.protocol import ParsedRequest
from olm_train.extensions.serve.worker import Piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
        self._pieces: list[list[Piece]] = [[] for _ in asked.requests]

    def take(self, piece: Piece) -> None:
        """Keep a piece.

        Raises:
            ValidationError: the model's logits are no numbers.
        """
        if piece.finish == "non-finite":
            raise ValidationError("the model gives non-finite logits")
        self._pieces[piece.number].append(piece)

    def whole(self) -> JsonObject:
        """Return the answer to a request that is no stream, when all pieces are taken."""
        choices = [self._whole(_joined(pieces)) for pieces in self._pieces]
        return {**self._say(self.whole_object, *choices), "usage": self._usage()}

    def _begin(self) -> Iterator[JsonObject]:
        """Yield the choices of events that come before the first piece."""
        return iter(())

    @abstractmethod
    def _whole(self, piece: Piece) -> JsonObject:
        """Return the choice of a whole text."""

    @abstractmethod
    def _event(self, piece: Piece) -> JsonObject:
        """Return the choice of the next piece of a text."""

    def events(self, pieces: Iterable[Piece], *, usage: bool) -> Iterator[JsonObject]:
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
            yield self._say(self.event_object, self._event(piece))
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


def _joined(pieces: Sequence[Piece]) -> Piece:
    """Return the pieces of a text as one."""
    return Piece(
        number=pieces[-1].number,
        text="".join(piece.text for piece in pieces),
        tokens=pieces[-1].tokens,
        scores=tuple(score for piece in pieces for score in piece.scores),
        prompt_scores=tuple(score for piece in pieces for score in piece.prompt_scores),
        finish=pieces[-1].finish,
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

    def _whole(self, piece: Piece) -> JsonObject:
        return self._choice(piece, first=True)

    def _event(self, piece: Piece) -> JsonObject:
        return self._choice(piece, first=len(self._pieces[piece.number]) == 1)

    def _choice(self, piece: Piece, *, first: bool) -> JsonObject:
        asked, number = self._asked, piece.number
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

    def _whole(self, piece: Piece) -> JsonObject:
        return self._choice(piece, "message", {"content": piece.text, "role": "assistant"})

    def _event(self, piece: Piece) -> JsonObject:
        return self._choice(piece, "delta", {"content": piece.text})

    def _choice(self, piece: Piece, name: str, message: JsonObject) -> JsonObject:
        logprobs = None
        if self._asked.requests[piece.number].logprobs is not None:
            logprobs = {"content": [self._scored(score) for score in piece.scores]}
        return {
            "index": piece.number,
            name: message,
            "finish_reason": piece.finish,
            "logprobs": logprobs,
        }

    def _scored(self, score: Scored) -> JsonObject:
        top = [self._token(*each) for each in score.top]
        return {**self._token(score.token, score.logprob or 0.0), "top_logprobs": top}

    def _token(self, token: int, value: float) -> JsonObject:
        return {"token": self._text(token), "logprob": value, "bytes": self._bytes(token)}
