"""`--decontaminate`: documents that share n words in a row with evaluation texts are dropped.

    text and JSONL files, eval sets -> words, lower case -> EvalTexts -> evaluation-texts.txt
    evaluation-texts.txt of an output --stored_texts--> EvalTexts, once a process
    document -> hashes of its n-grams, looked up among sorted ones -> words compared -> dropped

Words are runs of letters and digits; case, punctuation and white space are no difference. A hash
that is found says nothing by itself: the words decide, so none is dropped by chance. Memory is 16
bytes an n-gram, 4 a word, the texts, and their vocabulary.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import repeat

import numpy as np

from olm_data.bounded_json import MalformedJson, decode
from olm_data.counts import counted
from olm_data.dataset.eval_set import MANIFEST, EvalSet
from olm_data.dataset.inputs import InputFile
from olm_data.dataset.manifest import EVAL_TEXTS
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.sources.base import DocumentBatch
from olm_data.sources.line_blocks import stream_blocks
from olm_data.sources.listing import list_files
from olm_data.storage.store import Store
from olm_data.tokenization.near_duplicates import window_hashes
from olm_data.tokenizer.tokenizer import TokenizerSpec

MAX_BYTES = 4 << 30
PLANTED = 100
"""Texts of the self-test."""

_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return _WORD.findall(text.lower())


class EvalTexts:
    """Texts that no document may share n words in a row with.

    Args:
        data: the texts in sorted lines, words parted by spaces.
        n: words in a row that count.
    """

    def __init__(self, data: bytes, n: int) -> None:
        self.data, self.n = data, n
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.count = data.count(b"\n")

    def _texts(self) -> Iterator[list[str]]:
        """Yield the words of each text."""
        return map(str.split, self.data.decode().splitlines())

    @classmethod
    def of(cls, texts: Iterator[str], n: int) -> EvalTexts:
        """Return the texts, each once."""
        lines = sorted({" ".join(words_of(text)) for text in texts} - {""})
        return cls("".join(f"{line}\n" for line in lines).encode(), n)

    def __str__(self) -> str:
        short = f", {self.too_short:,} of them shorter and so never found" * bool(self.too_short)
        return f"{self.n} words in a row of {counted(self.count, 'evaluation text')}{short}"

    @property
    def too_short(self) -> int:
        """Texts of fewer words, which no document shares n of."""
        return sum(len(words) < self.n for words in self._texts())

    @cached_property
    def _grams(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
        """Sorted hashes uint64 [m], where each n-gram begins, words int32 and their numbers."""
        numbers: dict[str, int] = {}
        hashes, starts, words = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], []
        begin = 0
        for text in self._texts():
            own = (numbers.setdefault(word, len(numbers)) for word in text)
            words.append(np.fromiter(own, np.int32, len(text)))
            if len(text) >= self.n:
                hashes.append(window_hashes(words[-1].astype(np.uint64), self.n))
                starts.append(np.arange(begin, begin + len(hashes[-1])))
            begin += len(text)
        known, places = np.concatenate(hashes), np.concatenate(starts)
        order = np.argsort(known, kind="stable")
        return known[order], places[order], np.concatenate([*words, np.zeros(0, np.int32)]), numbers

    def shares(self, text: str) -> bool:
        """Whether n words in a row of a document stand in one of the texts."""
        words = words_of(text)
        known, starts, theirs, numbers = self._grams
        if len(words) < self.n or not len(known):
            return False
        # -1: a word of none of the texts
        mine = np.fromiter(map(numbers.get, words, repeat(-1)), np.int32, len(words))
        hashes = window_hashes(mine.astype(np.uint64), self.n)
        at = np.searchsorted(known, hashes)
        for k in np.flatnonzero(known.take(at, mode="clip") == hashes).tolist():
            end = np.searchsorted(known, hashes[k], side="right")
            for start in starts[at[k] : end].tolist():
                if np.array_equal(theirs[start : start + self.n], mine[k : k + self.n]):
                    return True
        return False

    def _has(self, text: str) -> bool:
        """Whether n words in a row of a text stand in the data; slow, without hashes."""
        words, data = words_of(text), f"\n{self.data.decode()}".replace("\n", " \n ")
        return any(
            f" {' '.join(words[k : k + self.n])} " in data for k in range(len(words) - self.n + 1)
        )

    def found(self, batch: DocumentBatch, *, chats: bool = False) -> np.ndarray:
        """Return bool [d]: the documents that share n words in a row with one of the texts.

        Args:
            chats: they are conversations, as JSON.
        """
        texts: Iterable[str] = map(batch.text, range(batch.documents))
        if chats:
            texts = (" ".join(_strings(decode(text.encode()))) for text in texts)
        return np.fromiter(map(self.shares, texts), bool, batch.documents)

    def self_test(self) -> str:
        """Plant n-grams of the texts in other words and find them; return what was done, in words.

        Raises:
            ValidationError: one is not found, or something else is.
        """
        long = [text for text in self._texts() if len(text) >= self.n]
        some = long[:: max(1, len(long) // PLANTED)][:PLANTED]
        for place, text in enumerate(some):
            first = place % (len(text) - self.n + 1)
            planted = text[first : first + self.n]
            shown = "Unlike it --\n" + ",  ".join(planted).upper() + "!\tunlike it"
            broken = " ".join([*planted[:-1], "0", *planted[1:]])  # n - 1 in a row, twice
            if not self.shares(shown) or (self.shares(broken) and not self._has(broken)):
                raise ValidationError(
                    "the self-test of --decontaminate failed: it finds other than what was planted",
                    where=" ".join(planted),
                    fix="report it with this text; no document was read",
                )
        return f"decontaminate: {self}; {len(some):,} planted in a self-test were found"


def read_texts(paths: Sequence[str], n: int, tokenizer: TokenizerSpec) -> EvalTexts:
    """Read evaluation texts: of each text file its text, of each JSON line all its strings.

    Args:
        paths: files or folders of them, or eval sets of `tokenizer`; local or remote.

    Raises:
        InputError: there is none, a file is of another format, or no text has n words.
        StorageError: remote storage fails.
    """

    def each() -> Iterator[str]:
        for path in paths:
            if Store(path).exists(MANIFEST):
                yield from _requests(path, tokenizer)
                continue
            for file in list_files([path]).files:
                yield from _texts(file)

    texts = EvalTexts.of(each(), n)
    if texts.too_short == texts.count:
        raise InputError(
            f"no evaluation text has {n} words, so nothing could be found",
            where=f"--decontaminate {' '.join(paths)}",
            fix=f"lower --decontaminate-ngram, now {n}, or name other files",
        )
    return texts


def stored_texts(store: Store, of: tuple[str, int] | None) -> EvalTexts | None:
    """Return the texts that are stored beside a plan; None where it has none.

    Args:
        of: sha256 of the file, and n.

    Raises:
        ValidationError: they are missing, or not those of the plan.
    """
    if of is None:
        return None
    try:
        data = store.read(EVAL_TEXTS, limit=MAX_BYTES)
    except FileNotFoundError:
        data = b""
    if hashlib.sha256(data).hexdigest() != of[0]:
        raise ValidationError(
            "the evaluation texts are missing or damaged",
            where=store.url(EVAL_TEXTS),
            fix="run the tokenize command that made the file again, or restore it from a copy",
        )
    return EvalTexts(data, of[1])


def _requests(path: str, tokenizer: TokenizerSpec) -> Iterator[str]:
    opened = EvalSet.open(path)
    if opened.info.tokenizer.sha256 != tokenizer.sha256:
        raise InputError(
            "the eval set was built with another tokenizer, so its ids are other words",
            where=f"--decontaminate {path}",
            fix="name the file of questions that it was built of",
        )
    requests = opened.requests
    for start, end in zip(requests.starts.tolist(), requests.ends.tolist(), strict=True):
        yield tokenizer.decode(requests.tokens[start:end])


def _texts(file: InputFile) -> Iterator[str]:
    if file.format not in ("txt", "jsonl"):
        raise UsageError(
            "evaluation texts are text files, files of JSON lines, or eval sets",
            where=f"--decontaminate {file.path}",
            fix='write a line for each question: {"question": "...", "answer": "..."}',
        )
    whole: list[str] = []
    for block, before in stream_blocks(file):
        lines = [block] if file.format == "txt" else block.split(b"\n")
        for number, line in enumerate(lines, before + 1):
            try:
                if file.format == "txt":
                    whole.append(line.decode())
                elif line.strip():
                    yield " ".join(_strings(decode(line)))
            except (UnicodeDecodeError, MalformedJson) as error:
                raise InputError(
                    f"the evaluation text cannot be read: {error}",
                    where=f"{file.path}, line {number}",
                ) from None
    yield "".join(whole)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
