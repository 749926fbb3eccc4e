"""Writes any number of texts at a time: each has its own prompt, wishes, seed and end.

    add(request) -> waiting --one packed prefill--> rows of the runner --one decode a token--> done

`step` is one call of the model. A text that ends leaves its row to one that waits, so that short
and long ones need not be sorted. What a text becomes does not depend on those beside it (in fp32,
up to logits that are equal in all but their last bits).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from olm_data.errors import UsageError
from olm_data.tokenizer.tokenizer import failure, library_errors
from olm_train.extensions.generate.runner import TextRunner
from olm_train.extensions.generate.sampling import Sampling, choose
from olm_train.extensions.generate.text import Stops, TextStream
from olm_train.model.head import Head

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_ROWS = 32
"""Texts at a time, unless told otherwise."""
PREFILL_TOKENS = 512
"""Prompts are packed up to so many tokens; a longer one is alone."""
_CHUNK = 1024
"""Tokens of a prompt whose logits exist at a time."""

Finish = Literal["stop", "length", "non-finite"]


class Scored(NamedTuple):
    """A token and how likely the model thought it, before any temperature.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability; None: it is the first of all.
        top: the most likely ids in its place, with theirs, the most likely one first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A text to be written.

    Attributes:
        prompt: ids before it, at least one.
        sampling: how tokens are chosen.
        max_new_tokens: it ends after so many; 0: the prompt is scored, nothing is written.
        stop: it ends before any of these strings.
        logprobs: how many of the most likely tokens are told with each; None: nothing is.
        score_prompt: the same of the prompt's tokens.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 100
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    score_prompt: bool = False


class WritingError(Exception):
    """Texts that cannot go on, by what is their own; the others can.

    Attributes:
        writings: these, which have ended.
    """

    def __init__(self, writings: Mapping[Generation, str]) -> None:
        why = next(iter(writings.values()))
        super().__init__(f"the tokenizer cannot write this text: {why}")
        self.writings = tuple(writings)


class Generation:
    """A text that is being written, or has been.

    Attributes:
        request: what was asked for.
        ids: so far, without the token that ended it.
        text: so far; what follows `certain` characters may still go.
        scores: of each of `ids`, if asked for; with the tokens of a stop string.
        prompt_scores: of each token of the prompt, if asked for.
        finish: why it ended: "stop", a stop string or the end of the document; "length", of
            `max_new_tokens` or of what the model can look at; "non-finite", logits that are no
            numbers. None: it has not.
    """

    def __init__(self, request: TextRequest, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.ids: list[int] = []
        self.scores: list[Scored] = []
        self.prompt_scores: list[Scored] = []
        self.finish: Finish | None = None
        self._stream = None if tokenizer is None else TextStream(tokenizer, request.prompt)
        self._stops = Stops(request.stop)

    @property
    def text(self) -> str:
        return self._stops.text

    @property
    def certain(self) -> int:
        """Characters of `text` that will stay."""
        return len(self.text) if self.finish else self._stops.certain

    def push(self, token: int) -> None:
        """Take the next token."""
        self.ids.append(token)
        if self._stream is not None:
            self._stops.push(self._stream.push(token))
            if self._stops.ended:
                self.finish = "stop"

    def end(self, finish: Finish) -> None:
        """Take no more."""
        if self.finish is None:
            if self._stream is not None:
                self._stops.push(self._stream.flush())
            self.finish = "stop" if self._stops.ended else finish


class Engine:
    """Texts of one model.

    Args:
        runner: calls the model.
        tokenizer: None: ids only, no stop strings.
        ends: ids that end a text.
        context: most tokens of a prompt and its text; None: no limit.
        max_rows: texts at a time.
        prefill_tokens: prompts are packed up to so many tokens; None: all that wait, as far as
            there are rows.
    """

    def __init__(
        self,
        runner: TextRunner,
        tokenizer: Tokenizer | None = None,
        *,
        ends: Collection[int] = (),
        context: int | None = None,
        max_rows: int = MAX_ROWS,
        prefill_tokens: int | None = PREFILL_TOKENS,
    ) -> None:
        self._runner, self._tokenizer = runner, tokenizer
        self._ends, self._context = frozenset(ends), context
        self._max_rows, self._prefill_tokens = max_rows, prefill_tokens
        self._waiting: deque[Generation] = deque()
        self._rows: list[Generation] = []
        self._next: list[int] = []  # the last token of each row, which the model has not seen

    @property
    def busy(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._waiting or self._rows)

    def add(self, request: TextRequest) -> Generation:
        """Begin a text.

        Raises:
            UsageError: the prompt is empty or too long, or nothing is asked for.
            InputError: the tokenizer cannot decode it.
        """
        if not request.prompt:
            raise UsageError("the prompt has no token", fix="give a prompt with some text")
        if request.stop and self._tokenizer is None:
            raise UsageError("stop strings need a tokenizer")
        room = None if self._context is None else self._context - len(request.prompt)
        if room is not None and room < min(1, request.max_new_tokens):
            raise UsageError(
                f"the prompt has {len(request.prompt):,} tokens, and the model looks at "
                f"{self._context:,} at most, the new ones among them",
                fix="give a shorter prompt",
            )
        with library_errors("the tokenizer fails to decode the end of the prompt"):
            writing = Generation(request, self._tokenizer)
        self._waiting.append(writing)
        return writing

    def drop(self, writing: Generation) -> None:
        """Give a text up; it may have ended."""
        if writing in self._waiting:
            self._waiting.remove(writing)
        elif writing in self._rows:
            self._remove(self._rows.index(writing))
        writing.end("length")

    def run(self, requests: Iterable[TextRequest]) -> list[Generation]:
        """Write texts to their ends; in the order of the requests."""
        writings = [self.add(request) for request in requests]
        while self.busy:
            self.step()
        return writings

    @torch.no_grad()
    def step(self, *, idle: bool = False) -> list[Generation]:
        """Call the model once; return the texts that have got a token or have ended.

        Args:
            idle: call it even for nothing, see `TextRunner.idle`.

        Raises:
            WritingError: some texts cannot go on; `step` can be called again for the others.
        """
        if self._waiting and len(self._rows) < self._max_rows:
            return self._begin(self._admitted())
        if not self._rows:
            if idle:
                self._runner.idle()
            return []
        writings = list(self._rows)
        logits = self._runner.decode(self._next)
        self._take(logits, 0)
        return writings

    def _admitted(self) -> list[Generation]:
        found: list[Generation] = []
        tokens = 0
        limit = self._prefill_tokens
        while self._waiting and len(self._rows) + len(found) < self._max_rows:
            size = len(self._waiting[0].request.prompt)
            if found and limit is not None and tokens + size > limit:
                break
            found.append(self._waiting.popleft())
            tokens += size
        return found

    def _begin(self, writings: list[Generation]) -> list[Generation]:
        requests = [writing.request for writing in writings]
        reads = [
            partial(_score, prompt=each.prompt, count=each.logprobs or 0)
            if each.score_prompt
            else None
            for each in requests
        ]
        first = len(self._rows)
        logits, scores = self._runner.prefill([each.prompt for each in requests], reads)
        for writing, found in zip(writings, scores, strict=False):
            writing.prompt_scores = found or []
        self._rows += writings
        self._next += [0] * len(writings)
        self._take(logits, first)
        return writings

    def _take(self, logits: Tensor, first: int) -> None:
        """Choose the next token of the rows from `first` on, and let go of those that have ended.

        Args:
            logits: [n, V] of these rows.
        """
        rows = self._rows[first:]
        logits = logits.float()
        finite = logits.isfinite().all(dim=-1)  # [n]
        if not (all_finite := bool(finite.all())):
            logits = logits.masked_fill(~finite[:, None], 0.0)
        told = [number for number, row in enumerate(rows) if row.request.logprobs is not None]
        known = logits[told].log_softmax(dim=-1) if told else logits[:0]
        wishes = [row.request.sampling for row in rows]
        seen = [
            torch.tensor([*row.request.prompt, *row.ids], device=logits.device).unique()
            if row.request.sampling.repetition_penalty != 1
            else None
            for row in rows
        ]
        tokens = choose(logits, wishes, [len(row.ids) for row in rows], seen)
        for place, number in enumerate(told):
            row = rows[number]
            if row.request.max_new_tokens and tokens[number] not in self._ends:
                count = row.request.logprobs or 0
                row.scores += _scores(known[place : place + 1], [tokens[number]], count)
        failed = dict[Generation, str]()
        for number in reversed(range(len(rows))):
            row, token = rows[number], tokens[number]
            if not all_finite and not finite[number]:
                row.end("non-finite")
            elif not row.request.max_new_tokens:
                row.end("length")
            elif token in self._ends:
                row.end("stop")
            else:
                try:
                    row.push(token)
                except BaseException as error:
                    if (said := failure(error)) is None:
                        raise
                    failed[row], row.finish = said, "stop"
                length = len(row.request.prompt) + len(row.ids)
                if len(row.ids) == row.request.max_new_tokens or length == self._context:
                    row.end("length")
            self._next[first + number] = token
            if row.finish is not None:
                self._remove(first + number)
        if failed:
            raise WritingError(failed)

    def _remove(self, row: int) -> None:
        """Let go of a row; the last one takes its place, here as in the runner."""
        self._runner.remove(row)
        self._rows[row], self._next[row] = self._rows[-1], self._next[-1]
        del self._rows[-1], self._next[-1]


def _scores(logprobs: Tensor, tokens: Sequence[int], count: int) -> list[Scored]:
    """Return tokens [n] with their logarithms, of those of all [n, V]."""
    index = torch.tensor(tokens, device=logprobs.device)[:, None]
    own = logprobs.gather(1, index)[:, 0].tolist()
    best = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Scored(token, value, tuple(zip(ids, values, strict=True)))
        for token, value, (ids, values) in zip(tokens, own, tops, strict=True)
    ]


def _score(head: Head, x: Tensor, *, prompt: Sequence[int], count: int) -> list[Scored]:
    """Return what the model thinks of each token of a prompt, of its states [n, d_model]."""
    found = [Scored(prompt[0], None, ())]
    for begin in range(0, len(prompt) - 1, _CHUNK):
        states = x[begin : min(begin + _CHUNK, len(prompt) - 1)]
        logprobs = head.logits(states).float().log_softmax(dim=-1)
        found += _scores(logprobs, prompt[begin + 1 : begin + 1 + len(states)], count)
    return found
