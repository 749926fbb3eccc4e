"""Compile a task with a tokenizer: questions -> requests -> ids -> an eval set.

Context and continuation are encoded together, as the model would read them, and cut where the
context alone ends; spaces at the end of a context go to the continuation (the rule of
lm-evaluation-harness and of OLMES). A BOS stands before each request where the tokenizer has one; a
request without a context begins with BOS, or else with EOS. Lengths are those of the continuation
as it was written, its leading space counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

import numpy as np

from olm_data.dataset.eval_set import (
    GOLD,
    MANIFEST,
    REQUESTS,
    TOKENS,
    UNCONDITIONAL,
    About,
    EvalSet,
    Primary,
    requests_of,
)
from olm_data.dataset.tokenizer import TokenizerRules
from olm_data.errors import InputError, UsageError, quoted
from olm_data.extensions.eval_sets.tasks import Task
from olm_data.storage.names import is_working
from olm_data.storage.output_paths import refuse_foreign, refuse_output
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import TokenizerSpec

MOST_CACHED = 1 << 14


def build(
    task: Task,
    tokenizer: TokenizerSpec,
    output: str,
    *,
    primary: Primary | None = None,
    licence: str | None = None,
) -> EvalSet:
    """Write a task as an eval set.

    Args:
        tokenizer: of the training data, with its BOS and EOS.
        output: folder; one that holds another set, or files of somebody else, is refused, the same
            is left as it is.
        primary: metric that it is judged by; default: the task's.
        licence: of its texts; default: what is known.

    Raises:
        InputError: the tokenizer makes no token of a choice.
        UsageError: the folder holds something else, or `primary` is not of this task.
    """
    refuse_output(output)
    primary = primary or task.primary
    lacking = any(c.unconditional is None for q in task.questions for c in q.choices)
    if primary is Primary.acc_uncond and lacking:
        raise UsageError(
            "acc_uncond needs an unconditional context for each choice, which this task lacks",
            where=task.source,
        )
    ids, rows, merged = list[np.ndarray[Any, Any]](), list[tuple[int, ...]](), 0
    end, pair = 0, _Pair(tokenizer)
    for row, context, continuation in _requests(task):
        before, after, spanned = pair(context, continuation)
        if not after:
            raise InputError(
                f"the tokenizer makes no token of choice {row[1]} of question {row[0]}: "
                f"{quoted(continuation)}",
                where=task.source,
                why="nothing would be asked of the model, and the choice be the most likely one",
                fix="leave the question out, or write the choice with characters that it knows",
            )
        merged += spanned
        ids.append(np.array([*before, *after], tokenizer.dtype))
        end += len(before) + len(after)
        size = len(continuation.encode())
        rows.append((end, len(before), len(continuation), size, *row))
    requests = requests_of(np.concatenate(ids), np.array(rows, np.int64))
    store = Store(output)
    if not store.exists(MANIFEST):
        refuse_foreign(store, _not_ours, kind="an eval set")
    rules = (tokenizer.sha256, tokenizer.probe_sha256, tokenizer.vocab_size)
    about = About(
        name=task.name,
        primary=primary,
        tokenizer=TokenizerRules(*rules, tokenizer.bos, tokenizer.eos),
        source=task.source,
        source_sha256=task.source_sha256,
        licence=licence or task.licence,
        merged=merged,
    )
    there = EvalSet.open(output) if store.exists(MANIFEST) else None
    fields = About.__struct_fields__
    if there is not None and any(getattr(there.info, n) != getattr(about, n) for n in fields):
        raise UsageError(
            "there is another eval set", where=output, fix="choose another --output, or delete it"
        )
    return there or EvalSet.write(store, about, requests)


def _not_ours(names: Set[str], inside: object) -> set[str]:
    """Return what no build that was interrupted has left in a folder."""
    ours = {TOKENS, REQUESTS}
    return {name for name in names - ours if not is_working(name.rstrip("/"))}


def _requests(task: Task) -> Iterator[tuple[tuple[int, int, int], str, str]]:
    """Yield (question, choice, kind), context and continuation of each request."""
    for number, question in enumerate(task.questions):
        for n, choice in enumerate(question.choices):
            gold = GOLD if n == question.gold else 0
            yield (number, n, gold), choice.context, choice.continuation
            if choice.unconditional is not None:
                kind = gold | UNCONDITIONAL
                yield (number, n, kind), choice.unconditional, choice.continuation


class _Pair:
    """Encodes pairs of context and continuation."""

    def __init__(self, tokenizer: TokenizerSpec) -> None:
        self._encode: Callable[[str], list[int]] = tokenizer.encode
        self._bos, self._eos = tokenizer.bos, tokenizer.eos
        self._known: dict[str, list[int]] = {}

    def __call__(self, context: str, continuation: str) -> tuple[list[int], list[int], bool]:
        """Return the ids of both, and whether a token spans the place where they meet.

        Raises:
            UsageError: there is no context, and no token that could stand for one.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            continuation = context[-spaces:] + continuation
            context = context[:-spaces]
        before = self._of_context(context)
        whole = self._encode(context + continuation)
        after = whole[len(before) :]
        spanned = whole[: len(before)] != before
        if not after:  # the last token of the context swallowed the continuation
            after = self._encode(continuation)
        first = [] if self._bos is None else [self._bos]
        if not first and not before:
            if self._eos is None:
                raise UsageError(
                    "a request has no context, and the tokenizer neither BOS nor EOS",
                    why="the probability of a first token is not defined",
                )
            first = [self._eos]
        return first + before, after, spanned

    def _of_context(self, context: str) -> list[int]:
        found = self._known.get(context)
        if found is None:
            if len(self._known) >= MOST_CACHED:
                self._known.clear()
            found = self._known[context] = self._encode(context)
        return found
