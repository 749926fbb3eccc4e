"""Answers of the server, put together of the pieces of their texts, whole or one by one.

Piece -> take -> ... -> whole()          Piece -> events() -> one JSON object each
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from olm_data.errors import ValidationError
from olm_data.tokenizer.byte_alphabet import byte_alphabet
from olm_train.extensions.generate.engine import Scored
from olm_train.extensions.generate.text import TextStream
from olm_train.extensions.serve.protocol import (
    Answer,
    ChatChoice,
    ChatLogprobs,
    ChatMessageOut,
    CompletionChoice,
    CompletionLogprobs,
    ParsedRequest,
    TokenLogprob,
    TopLogprob,
    Usage,
)
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

    @abstractmethod
    def whole(self) -> Answer:
        """Return the answer once all texts have ended."""

    @abstractmethod
    def _begin(self) -> Iterator[Answer]:
        """Yield the events before all pieces."""

    @abstractmethod
    def _event(self, piece: Piece) -> Answer:
        """Return the event of a piece that was just taken."""

    def events(self, pieces: Iterable[Piece], *, usage: bool) -> Iterator[Answer]:
        """Yield the events of a stream.

        Args:
            pieces: as they come.
            usage: the last event tells how many tokens there were.
        """
        begun = False
        for piece in pieces:
            self.take(piece)
            if not begun:
                yield from self._begin()
                begun = True
            yield self._event(piece)
        if usage:
            yield self._say(self.event_object, [], self._usage())

    def _usage(self) -> Usage:
        requests = self._asked.requests
        # Texts of one prompt have the very same tuple: it counts once.
        prompts = sum(map(len, {id(each.prompt): each.prompt for each in requests}.values()))
        written = sum(pieces[-1].tokens for pieces in self._pieces if pieces)
        return Usage(prompts, written, prompts + written)

    def _say(
        self,
        kind: str,
        choices: list[CompletionChoice] | list[ChatChoice],
        usage: Usage | UnsetType = UNSET,
    ) -> Answer:
        return Answer(
            id=self._id,
            object=kind,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

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

    def whole(self) -> Answer:
        choices = [self._choice(_joined(pieces), first=True) for pieces in self._pieces]
        return self._say(self.whole_object, choices, self._usage())

    def _begin(self) -> Iterator[Answer]:
        return iter(())

    def _event(self, piece: Piece) -> Answer:
        first = len(self._pieces[piece.number]) == 1
        return self._say(self.event_object, [self._choice(piece, first=first)])

    def _choice(self, piece: Piece, *, first: bool) -> CompletionChoice:
        asked, number = self._asked, piece.number
        prompt = asked.prompts[number] if asked.echo and first else ""
        logprobs = None
        if asked.requests[number].logprobs is not None:
            told = piece.prompt_scores[asked.begun[number] :]
            logprobs = self._logprobs(number, [*told, *piece.scores])
        return CompletionChoice(number, prompt + piece.text, piece.finish, logprobs)

    def _logprobs(self, number: int, scores: Sequence[Scored]) -> CompletionLogprobs:
        offsets = []
        for score in scores:
            offsets.append(self._characters[number])
            self._characters[number] += len(self._streams[number].push(score.token))
        return CompletionLogprobs(
            tokens=[self._name(score.token) for score in scores],
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=[
                None
                if score.logprob is None
                else {self._name(token): value for token, value in reversed(score.top)}
                for score in scores
            ],
            text_offset=offsets,
        )


class ChatAnswer(_Answers):
    """The answer of `/v1/chat/completions`."""

    whole_object, event_object = "chat.completion", "chat.completion.chunk"

    def whole(self) -> Answer:
        choices = []
        for pieces in self._pieces:
            piece = _joined(pieces)
            choices.append(
                ChatChoice(
                    index=piece.number,
                    message=ChatMessageOut(piece.text, "assistant"),
                    finish_reason=piece.finish,
                    logprobs=self._logprobs(piece),
                )
            )
        return self._say(self.whole_object, choices, self._usage())

    def _begin(self) -> Iterator[Answer]:
        for number in range(len(self._pieces)):
            choice = ChatChoice(
                index=number, delta=ChatMessageOut("", "assistant"), finish_reason=None
            )
            yield self._say(self.event_object, [choice])

    def _event(self, piece: Piece) -> Answer:
        choice = ChatChoice(
            index=piece.number,
            delta=ChatMessageOut(piece.text),
            finish_reason=piece.finish,
            logprobs=self._logprobs(piece),
        )
        return self._say(self.event_object, [choice])

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if self._asked.requests[piece.number].logprobs is None:
            return None
        return ChatLogprobs(
            [
                TokenLogprob(
                    token=self._text(score.token),
                    logprob=score.logprob or 0.0,
                    bytes=self._bytes(score.token),
                    top_logprobs=[self._top(*each) for each in score.top],
                )
                for score in piece.scores
            ]
        )

    def _top(self, token: int, value: float) -> TopLogprob:
        return TopLogprob(self._text(token), value, self._bytes(token))
