"""An eval set: the requests of a task as token ids, in a folder that a digest names.

    EvalSet.write -> eval_set.json   what it is, digests of the other two, and its own
                     tokens.bin      ids of all requests, one behind the other (uint16 | uint32)
                     requests.bin    int64 [requests, 7], little-endian: COLUMNS of each
    EvalSet.open  <- the same folder, local or remote; what is not as its digest says is refused

A request is a context and a continuation that may follow it; the requests of a question are its
choices, of which one is right.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import MalformedJson, Size, canonical_json, decode, digest
from olm_data.dataset.tokenizer import TokenizerRules
from olm_data.errors import InputError, ValidationError, printable
from olm_data.run_log.metric_names import (
    EVAL_ACC,
    EVAL_BPB,
    EVAL_LEN_NORM,
    EVAL_PER_TOKEN,
    EVAL_UNCOND,
)
from olm_data.storage.store import Store, read_json, write_json

MANIFEST, TOKENS, REQUESTS = "eval_set.json", "tokens.bin", "requests.bin"
MAX_BYTES = 4 << 30
COLUMNS = ("end", "context", "chars", "bytes", "question", "choice", "kind")
"""Of a request: where its tokens end, tokens of its context, characters and bytes of its
continuation, number of its question, of its choice, and KIND_* bits."""
GOLD, UNCONDITIONAL = 1, 2
"""The right choice; the same continuation after a context that does not ask the question."""


class Primary(StrEnum):
    """The metric that a task is judged by, see `olm_train.evaluation.scoring`."""

    acc = EVAL_ACC
    len_norm = EVAL_LEN_NORM
    acc_per_token = EVAL_PER_TOKEN
    acc_uncond = EVAL_UNCOND
    bpb = EVAL_BPB


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an eval set was made of.

    Attributes:
        name: of the task.
        primary: metric that the task is judged by.
        tokenizer: whose ids they are.
        source: what it was made of, in words.
        source_sha256: of the requests as they were read.
        licence: of the texts, as far as it is known.
        merged: requests in which a token spans the end of the context and the continuation.
    """

    name: str
    primary: Primary
    tokenizer: TokenizerRules
    source: str
    source_sha256: str
    licence: str
    merged: Size


class EvalSetInfo(About, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`eval_set.json`.

    Attributes:
        questions, requests, tokens: counts.
        sha256: digests of the other files, by name.
        digest: of all of this but itself; the name of the set.
    """

    questions: Size
    requests: Size
    tokens: Size
    sha256: dict[str, str]
    digest: str
    version: Literal[1] = 1


@dataclass(frozen=True)
class Requests:
    """The requests of a task; arrays of [requests], sorted by question, then choice.

    Attributes:
        tokens: ids of all requests, one behind the other.
        ends: where each one's ids end.
        context: tokens of each one's context; at least 1.
        chars, bytes: of the continuation's text.
        question, choice: numbers.
        gold, unconditional: bool.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    context: NDArray[np.int64]
    chars: NDArray[np.int64]
    bytes: NDArray[np.int64]
    question: NDArray[np.int64]
    choice: NDArray[np.int64]
    gold: NDArray[np.bool_]
    unconditional: NDArray[np.bool_]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each one's ids begin."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @property
    def questions(self) -> int:
        """How many questions there are."""
        return int(self.question[-1]) + 1 if len(self.question) else 0


class EvalSet:
    """An eval set that has been written or opened.

    Attributes:
        folder: path or URL.
        info: what it is.
        requests: all of it, in memory.
    """

    def __init__(self, folder: str, info: EvalSetInfo, requests: Requests) -> None:
        self.folder, self.info, self.requests = folder, info, requests

    @classmethod
    def write(cls, store: Store, about: About, requests: Requests) -> EvalSet:
        """Write a set; the folder must not hold another one.

        Raises:
            ConflictError, ResourceError, StorageError: it cannot be written.
        """
        dtype = np.uint16 if about.tokenizer.vocab_size <= 1 << 16 else np.uint32
        kind = GOLD * requests.gold + UNCONDITIONAL * requests.unconditional
        own = (requests.chars, requests.bytes, requests.question, requests.choice, kind)
        table = np.stack([requests.ends, requests.context, *own], 1).astype("<i8")
        tokens = requests.tokens.astype(np.dtype(dtype).newbyteorder("<"))
        data = {TOKENS: tokens.tobytes(), REQUESTS: table.tobytes()}
        counted = EvalSetInfo(
            **{name: getattr(about, name) for name in About.__struct_fields__},
            questions=requests.questions,
            requests=len(requests.ends),
            tokens=len(tokens),
            sha256={name: hashlib.sha256(each).hexdigest() for name, each in data.items()},
            digest="",
        )
        whole = msgspec.structs.replace(counted, digest=_digest(counted))
        for name, each in data.items():
            store.put(name, each, limit=MAX_BYTES)
        write_json(store, MANIFEST, canonical_json(msgspec.to_builtins(whole)) + b"\n")
        return cls(store.root, whole, requests)

    @classmethod
    def open(cls, folder: str) -> EvalSet:
        """Open the set in a folder, and check all of it.

        Raises:
            InputError: there is none.
            ValidationError: it is damaged or was changed.
        """
        store = Store(folder)
        try:
            info = decode(read_json(store, MANIFEST), EvalSetInfo)
        except FileNotFoundError:
            raise InputError(
                f"this is no eval set: it has no {MANIFEST}",
                where=folder,
                fix="make one: olm-data eval-set build",
            ) from None
        except MalformedJson as error:
            raise _damaged(store, MANIFEST, printable(str(error))) from None
        if info.digest != _digest(info):
            raise _damaged(store, MANIFEST, "its digest is another one: it was changed")
        data = {}
        for name in (TOKENS, REQUESTS):
            try:
                data[name] = store.read(name, limit=MAX_BYTES)
            except FileNotFoundError:
                raise _damaged(store, name, "the file is missing") from None
            if hashlib.sha256(data[name]).hexdigest() != info.sha256.get(name):
                raise _damaged(store, name, "it does not match its digest")
        dtype = np.dtype("<u2" if info.tokenizer.vocab_size <= 1 << 16 else "<u4")
        tokens = np.frombuffer(data[TOKENS], dtype)
        table = np.frombuffer(data[REQUESTS], "<i8").reshape(-1, len(COLUMNS))
        found = requests_of(tokens, table)
        wrong = _fault(found, info)
        if wrong is not None:
            raise _damaged(store, REQUESTS, wrong)
        return cls(store.root, info, found)


def requests_of(tokens: NDArray[Any], table: NDArray[np.int64]) -> Requests:
    """Return the requests of ids and of a table with the columns COLUMNS."""
    ends, context, chars, size, question, choice, kind = table.T.astype(np.int64)
    return Requests(
        tokens=tokens,
        ends=ends,
        context=context,
        chars=chars,
        bytes=size,
        question=question,
        choice=choice,
        gold=(kind & GOLD) > 0,
        unconditional=(kind & UNCONDITIONAL) > 0,
    )


def _fault(found: Requests, info: EvalSetInfo) -> str | None:
    """Return what is wrong with requests that whoever made the digest wrote; None: nothing."""
    lengths = np.diff(found.ends, prepend=0)
    counts = (len(found.ends), len(found.tokens), found.questions)
    if counts != (info.requests, info.tokens, info.questions) or not len(found.ends):
        return "its counts are other ones than the manifest's"
    if found.ends[-1] != len(found.tokens) or (found.context < 1).any():
        return "requests do not end where the tokens do, or have no context"
    if (lengths <= found.context).any() or found.tokens.max() >= info.tokenizer.vocab_size:
        return "a request has no continuation, or an id is beyond the vocabulary"
    steps = np.diff(found.question, prepend=-1)
    golds = np.bincount(found.question[found.gold & ~found.unconditional])
    if ((steps != 0) & (steps != 1)).any() or len(golds) != info.questions or (golds != 1).any():
        return "a question has not one right choice"
    return None


def _digest(info: EvalSetInfo) -> str:
    plain = msgspec.to_builtins(info)
    del plain["digest"]
    return digest(plain)


def _damaged(store: Store, name: str, what: str) -> ValidationError:
    return ValidationError(
        f"the eval set is damaged: {what}",
        where=store.url(name),
        why="scores would be of other requests than its digest names",
        fix="build it again: olm-data eval-set build",
    )
