"""Conversations as ids and trained tokens: the encoder of chats.

    JSON of a conversation -> Marker.render -> names of special tokens that no text spells
        -> the tokenizer, once over the whole text -> ids, places of tokens -> runs that are trained

The ids are those of the tokenizer for the render, special tokens of the template as themselves, and
what spells one in a message as text. That is compared, now and then, with the tokenizer as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from olm_data.dataset.inputs import ChatOptions
from olm_data.encoders.base import Encoded, concatenate, count_ids
from olm_data.errors import ValidationError
from olm_data.extensions.chat.conversations import Conversation, Refused, parse
from olm_data.extensions.chat.spans import Marker, Render, Span, Turn, moved
from olm_data.extensions.chat.template import Template
from olm_data.tokenizer.tokenizer import TokenizerSpec, ids_or_none, open_reference

AUDITED, AUDIT_EVERY = 16, 1000
"""Audited in each process: the first conversations, and then one of so many."""

_THOUGHTS = re.compile(r"(?:<think>)?(?:(?!<think>).)*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Made:
    """A conversation that is encoded.

    Attributes:
        ids: uint32 [n].
        trained: bool [n].
        spelled: strings in messages that spell a special token.
        cut: messages left out for `--max-tokens`.
    """

    ids: np.ndarray
    trained: np.ndarray
    spelled: int
    cut: int = 0


class ChatEncoder:
    """Encodes the JSON of conversations; has `encode` as a `TextEncoder` has.

    Args:
        tokenizer: the tokenizer, its own end token among the special ones.
        options: template, and what is trained.
    """

    def __init__(self, tokenizer: TokenizerSpec, options: ChatOptions) -> None:
        self._tokenizer, self._options = tokenizer, options
        special = tokenizer.special_tokens
        template = Template(options.template, options.special)
        self._marker = Marker(template, special, options.special.get("eos_token"))
        hidden = tokenizer.encoder_json(unspellable=True)
        self._hidden = open_reference(hidden, plain=False, name=tokenizer.name)
        self._as_is = open_reference(tokenizer.json_bytes, plain=False, name=tokenizer.name)
        self._names = {name: str(self._hidden.id_to_token(i)) for name, i in special.items()}
        self._unknown = np.array([] if tokenizer.unk is None else [tokenizer.unk], np.uint32)
        self._seen = 0

    def encode(
        self,
        data: np.ndarray,
        offsets: np.ndarray,
        where: Callable[[int], str] = "document {} of the batch".format,
    ) -> Encoded:
        """Encode conversations.

        Args:
            data, offsets: their JSON, as `TextEncoder.encode` takes text.
            where: names conversation k of this batch, for messages.

        Raises:
            ValidationError: ids that are not those of the tokenizer.
        """
        made: list[Made] = []
        failed, reasons = {}, {}
        nothing = Made(np.empty(0, np.uint32), np.empty(0, bool), 0)
        for k in range(len(offsets) - 1):
            text = data[offsets[k] : offsets[k + 1]].tobytes().decode()
            try:
                made.append(self._fitting(parse(text), where(k)))
            except Refused as error:
                failed[k], reasons[k] = str(error), error.reason
                made.append(nothing)
        ids, ends = concatenate([each.ids.tobytes() for each in made])
        encoded, ends = ids.view(np.uint32), ends // 4
        return Encoded(
            encoded,
            ends,
            sum(each.spelled for each in made),
            count_ids((encoded, ends), self._unknown),
            failed,
            0,
            trained=np.concatenate([each.trained for each in made]),
            cut=np.array([each.cut for each in made], np.int64),
            reasons=reasons,
        )

    def _fitting(self, given: Conversation, where: str) -> Made:
        """Return a conversation of at most `max_tokens`, cut at the borders of turns."""
        most, size = self._options.max_tokens, 0
        for chosen in self._cuts(given):
            made = self._one(given.cut(chosen), where)
            if most is None or len(made.ids) <= most:
                cut = len(given.messages) - len(chosen)
                return Made(made.ids, made.trained, made.spelled, cut)
            size = size or len(made.ids)
        raise Refused("too_long", f"{size:,} tokens; --max-tokens is {most:,}")

    def _cuts(self, given: Conversation) -> Iterator[list[int]]:
        """Yield the messages to try, all of them first."""
        roles = [message["role"] for message in given.messages]
        yield list(range(len(roles)))
        if self._options.too_long == "right":
            for stop in range(len(roles) - 1, 0, -1):
                if roles[stop - 1] == "assistant" and roles[stop] == "user":
                    yield list(range(stop))
        elif self._options.too_long == "left":
            head = [k for k, role in enumerate(roles) if role in ("system", "developer")]
            for start in range(1, len(roles)):
                if roles[start] == "user" and roles[start - 1] == "assistant":
                    yield [k for k in head if k < start] + list(range(start, len(roles)))

    def _one(self, given: Conversation, where: str) -> Made:
        render = self._marker.render(given)
        text, place = moved(render.text, render.special, self._names)
        encoding = self._hidden.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        self._audit(render, ids, where)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        trained = np.zeros(len(ids), bool)
        for a, b in self._spans(given, render):
            first, stop = place(a), place(b)
            inside = (offsets[:, 0] >= first) & (offsets[:, 1] <= stop)
            inside &= offsets[:, 1] > offsets[:, 0]
            run = np.flatnonzero(inside)
            whole = len(run) and (offsets[run[0], 0], offsets[run[-1], 1]) == (first, stop)
            if not whole or run[-1] - run[0] + 1 != len(run):
                raise Refused("span", "a token is partly in what is trained, and partly before it")
            self._check(ids[run], render.text[a:b])
            trained[run] = True
        if not trained.any():
            raise Refused("untrained", "no token of it would be trained")
        return Made(ids, trained, render.spelled)

    def _check(self, ids: np.ndarray, text: str) -> None:
        """Refuse a run that decodes to something else than it is said to."""
        if self._tokenizer.lossless and self._tokenizer.decode(ids) != text:
            raise Refused("span", "what is trained decodes to another text")

    def _audit(self, render: Render, ids: np.ndarray, where: str) -> None:
        """Compare ids with those of the tokenizer as it is, which knows no text from a token."""
        self._seen += 1
        if render.spelled or (self._seen > AUDITED and self._seen % AUDIT_EVERY):
            return
        if ids_or_none(self._as_is, render.text) != ids.tolist():
            raise ValidationError(
                "the ids of a conversation are not those of the tokenizer",
                where=where,
                fix="report this conversation and its chat template",
            )

    def _spans(self, given: Conversation, render: Render) -> Iterator[Span]:
        """Yield what is trained in the text of a render, in order; neighbours are not joined."""
        options, turns = self._options, render.turns
        chosen = self._chosen(given)
        last = max((k for k, on in enumerate(chosen) if on), default=-1)
        for k, (turn, on) in enumerate(zip(turns, chosen, strict=True)):
            wanted = {"all": True, "turn": on, "last": k == last, "none": False}[options.ends]
            if on:
                if wanted and turn.end is None and turn.role == "assistant":
                    raise Refused("span", f"no token ends message {k}, so nothing says to stop")
                stop = turn.stop if turn.end is None else turn.end[0]
                if turn.answer < turn.content or turn.role == "assistant":
                    yield from self._answer(turn, render.text, stop)
                else:
                    yield turn.content, turn.stop
            if wanted and turn.end is not None:
                yield turn.end

    def _answer(self, turn: Turn, text: str, stop: int) -> Iterator[Span]:
        """Yield what is trained of an answer, without the token that ends it."""
        first = turn.answer
        if self._options.thinking == "mask" and (found := _THOUGHTS.match(text, first, stop)):
            first = found.end()
        if first < stop:
            yield first, stop

    def _chosen(self, given: Conversation) -> list[bool]:
        """Return for each message whether it is trained."""
        roles = [message["role"] for message in given.messages]
        train = self._options.train
        last = max((k for k, role in enumerate(roles) if role == "assistant"), default=-1)
        chosen = {
            "all": [True] * len(roles),
            "last": [k == last for k in range(len(roles))],
        }.get(train, [role in train.split(",") for role in roles])
        flags = given.flags or [None] * len(roles)
        return [on if flag is None else flag for on, flag in zip(chosen, flags, strict=True)]
