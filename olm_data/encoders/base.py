"""Encoders, their buffers, and what every run does around one: text in, token ids out.

An encoder plug-in turns text into the ids of document bodies. It adds no BOS and no EOS, truncates
and pads nothing, and works on one thread. `TextEncoder` wraps a plug-in with what holds for all of
them: what is not proved goes to the reference, strings that spell a special token are counted and
treated as `--special` says, and no id of a special token is let through in "plain" mode.

    data uint8[n], offsets int64[d + 1]  ->  Encoder.encode  ->  ids uint32[t], offsets int64[d + 1]
    bytes of documents -> concatenate        chosen_of, merged: taken apart and put together

    text -> Scanner (count, or refuse) -> proved of it? -> Encoder.encode   -> special id in a body?
                                          else          -> reference        -> then by the reference
         -> documents nobody can encode are named, unknown tokens counted
         -> first, 10th, 100th, ... document: as the reference?

Also: how the ids that two encoders give differ.

Also: how many characters a BPE model without unknown token leaves out of a text, in silence. The
library drops such symbols (BPE::merge_word of tokenizers); all other model types give an unknown
token or fail. Not used for a model that has an unknown token, or bytes for all characters.

    text -> the file's normaliser -> its pre-tokenizer -> words -> symbols the vocabulary lacks
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from olm_data.dataset.inputs import SpecialPolicy
from olm_data.encoders.code_points import ReferenceRouter
from olm_data.errors import InputError, ValidationError
from olm_data.tokenizer.definition import BpeModel, Definition
from olm_data.tokenizer.tokenizer import TokenizerSpec

Texts = tuple[np.ndarray, np.ndarray]
"""UTF-8 of documents, concatenated, uint8[n], and their offsets int64[d + 1]."""

Ids = tuple[np.ndarray, np.ndarray]
"""ids of documents, concatenated, uint32[t], and their offsets int64[d + 1]."""


class Encoder(Protocol):
    """A way to turn text into ids: `hf` (the reference) or `gigatoken`."""

    name: str

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> Ids:
        """Encode documents.

        Args:
            data: uint8[n], valid UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.

        Returns:
            ids uint32[t] and their offsets int64[d + 1], rising from 0 to t; bodies only.

        Raises:
            Unencodable: some documents cannot be encoded; the others can.
        """
        ...


class Unencodable(Exception):
    """Documents of a batch that an encoder cannot encode.

    Attributes:
        why: document -> reason.
    """

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__(f"{len(why)} documents: {next(iter(why.values()))}")
        self.why = why


class Encoded(NamedTuple):
    """Token ids of a batch of documents.

    Attributes:
        ids: uint32[t], document bodies one after another.
        offsets: int64[d + 1], rising from 0 to t.
        special_hits: number of strings in the text that spell a special token.
        unknown: int64[d], unknown tokens of each document.
        failed: document -> why it cannot be encoded; it has no ids.
        by_reference: documents that were given to the reference as nothing is proved of them.
        trained: bool[t], which ids are trained; None: all are.
        cut: int64[d], parts of each document left out for its length; None: nothing was.
        reasons: document that failed -> why, as a key of `DROP_REASONS`; else `unencodable`.
    """

    ids: np.ndarray
    offsets: np.ndarray
    special_hits: int
    unknown: np.ndarray
    failed: Mapping[int, str]
    by_reference: int
    trained: np.ndarray | None = None
    cut: np.ndarray | None = None
    reasons: Mapping[int, str] = {}


def concatenate(texts: Iterable[bytes]) -> Texts:
    """Return the buffers of documents given as bytes."""
    rows = list(texts)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.frombuffer(b"".join(rows), dtype=np.uint8), offsets


def chosen_of(batch: Texts | Ids, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen documents (bool[d]) of a batch, in order."""
    values, offsets = batch
    lengths = np.diff(offsets)
    ends = np.cumsum(lengths[chosen])
    return values[np.repeat(chosen, lengths)], np.concatenate([np.zeros(1, np.int64), ends])


def merged(chosen: np.ndarray, one: Ids, other: Ids) -> Ids:
    """Return the batch whose documents are those of `one` where `chosen` (bool[d]), of `other`
    elsewhere."""
    lengths = np.zeros(len(chosen), np.int64)
    lengths[chosen], lengths[~chosen] = np.diff(one[1]), np.diff(other[1])
    ids = np.empty(int(lengths.sum()), np.uint32)
    mine = np.repeat(chosen, lengths)
    ids[mine], ids[~mine] = one[0], other[0]
    return ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def ids_of(made: Ids, k: int) -> np.ndarray:
    """Return the ids of document k."""
    ids, offsets = made
    return ids[offsets[k] : offsets[k + 1]]


def count_ids(made: Ids, wanted: np.ndarray) -> np.ndarray:
    """Return how many of the ids of each document are among `wanted` (uint32, ascending): int64[d].

    The wanted ids are few and mostly above all others, so the largest id is nearly always all there
    is to look at.
    """
    ids, offsets = made
    counts = np.zeros(len(offsets) - 1, np.int64)
    if len(wanted) and len(ids) and ids.max() >= wanted[0]:
        at = np.flatnonzero((ids >= wanted[0]) & (ids <= wanted[-1]))
        at = at[np.isin(ids[at], wanted)] if len(at) else at
        np.add.at(counts, np.searchsorted(offsets, at, side="right") - 1, 1)
    return counts


def differences(wanted: Ids, got: Ids) -> list[int]:
    """Return which documents have other ids in `got`; all where not even their number agrees."""
    documents = len(wanted[1]) - 1
    if len(got[1]) != len(wanted[1]):
        return list(range(documents))
    if np.array_equal(wanted[1], got[1]) and np.array_equal(wanted[0], got[0]):
        return []
    return [
        k for k in range(documents) if not np.array_equal(ids_of(wanted, k), ids_of(got, k))
    ] or list(range(documents))


def compare(wanted: Ids, got: Ids) -> str:
    """Return "" where both are the same, or a sentence naming the first difference."""
    differ = differences(wanted, got)
    if not differ:
        return ""
    k = differ[0]
    if len(got[1]) != len(wanted[1]):
        return f"{len(got[1]) - 1} documents, not {len(wanted[1]) - 1}"
    one, other = ids_of(wanted, k), ids_of(got, k)
    if np.array_equal(one, other):
        return "the offsets of the documents differ"
    return f"document {k} of the sample: {first_difference(one, other)}"


def first_difference(wanted: np.ndarray, got: np.ndarray) -> str:
    """Say in words where two rows of ids part."""
    common = min(len(wanted), len(got))
    differ = np.flatnonzero(wanted[:common] != got[:common])
    if len(differ):
        at = int(differ[0])
        return f"token {at} is {int(got[at])}, not {int(wanted[at])}"
    return f"{len(got)} tokens, not {len(wanted)}"


SCAN_BYTES = 1 << 17  # looked at at once: with its masks it stays in the processor's cache


class Scanner:
    """Finds the strings that spell special tokens in a buffer of documents."""

    def __init__(self, tokens: Iterable[str]) -> None:
        groups: dict[bytes, list[bytes]] = {}
        for token in tokens:
            spelled = token.encode()
            if spelled:
                groups.setdefault(spelled[:2], []).append(spelled)
        self._groups = [
            (prefix, re.compile(b"|".join(map(re.escape, sorted(group, key=len, reverse=True)))))
            for prefix, group in sorted(groups.items())
        ]

    def hits(self, data: np.ndarray, offsets: np.ndarray) -> list[tuple[int, str]]:
        """Return (document, token) of each hit, document by document within a group of tokens.

        Args:
            data: uint8[n], UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.
        """
        found: list[tuple[int, str]] = []
        for prefix, pattern in self._groups:
            if not _occurs(prefix, data):
                continue
            text, place = data.tobytes(), 0
            while match := pattern.search(text, place):
                document = int(np.searchsorted(offsets, match.start(), side="right")) - 1
                stop = int(offsets[document + 1])
                if match.end() > stop:  # it goes on into the next document: look up to here alone
                    match = pattern.search(text, match.start(), stop)
                if match:
                    found.append((document, match.group().decode()))
                place = match.end() if match else stop
        return found


def _occurs(prefix: bytes, data: np.ndarray) -> bool:
    """Whether one or two bytes occur in uint8[n]; several times as fast as `in` on bytes."""
    for start in range(0, len(data), SCAN_BYTES):
        part = data[start : start + SCAN_BYTES + 1]  # one more: a pair may lie across
        found = part == prefix[0]
        if len(prefix) == 2:
            found = found[:-1] & (part[1:] == prefix[1])
        if found.any():
            return True
    return False


def special_ids(tokenizer: TokenizerSpec) -> np.ndarray:
    """Return the ids (uint32, ascending) that never occur in a document body in "plain" mode.

    The unknown token is left out: it is what some tokenizers make of ordinary text.
    """
    ids = {i for i in tokenizer.special_tokens.values() if i != tokenizer.unk}
    ids |= {i for i in (tokenizer.eos, tokenizer.bos) if i is not None}
    return np.array(sorted(ids), dtype=np.uint32)


def lost_characters(spec: TokenizerSpec) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
    """Return a function from texts to the characters lost of each; None: no character can be.

    The function takes uint8[n], UTF-8 of the documents, and offsets int64[d + 1], and returns
    int64[d].
    """
    model = Definition(spec.json_bytes, spec.name).bpe
    if model is None or model.unk_token is not None:
        return None
    lost = _LostSymbols(spec, model)
    return None if lost.has_all_bytes else lost.count


class _LostSymbols:
    def __init__(self, spec: TokenizerSpec, model: BpeModel) -> None:
        self._tokenizer = spec.reference
        self._vocabulary = frozenset(model.vocab)
        self._prefix = model.continuing_subword_prefix or ""
        self._suffix = model.end_of_word_suffix or ""
        self._whole = bool(model.ignore_merges)
        self._bytes = bool(model.byte_fallback)
        self._has = cache(self._found)

    @property
    def has_all_bytes(self) -> bool:
        """Whether every character has symbols: as bytes, or as letters that stand for bytes."""
        if self._bytes and all(f"<0x{byte:02X}>" in self._vocabulary for byte in range(256)):
            return True
        from tokenizers import pre_tokenizers

        split = self._tokenizer.pre_tokenizer
        if split is None or self._prefix or self._suffix:
            return False
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        # a byte-level split spells each character by letters of its alphabet
        spelled = "".join(word for word, _ in split.pre_tokenize_str("\u00e9\u4e2d\U0001f642"))
        return set(spelled) <= alphabet and alphabet <= self._vocabulary

    def count(self, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        view = np.ascontiguousarray(data).data
        ends = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        counts = [self._count(view[a:b].tobytes().decode()) for a, b in ends]
        return np.array(counts, dtype=np.int64)

    def _count(self, text: str) -> int:
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        split = self._tokenizer.pre_tokenizer
        words = [text] if split is None else [word for word, _ in split.pre_tokenize_str(text)]
        return sum(self._lost_of(word) for word in words)

    def _lost_of(self, word: str) -> int:
        if self._whole and word in self._vocabulary:
            return 0
        last = len(word) - 1
        return sum(not self._has(letter, i == 0, i == last) for i, letter in enumerate(word))

    def _found(self, letter: str, first: bool, last: bool) -> bool:
        """Whether there are symbols for a letter of a word; `_has` keeps the answers."""
        symbol = ("" if first else self._prefix) + letter + (self._suffix if last else "")
        as_bytes = (f"<0x{byte:02X}>" in self._vocabulary for byte in symbol.encode())
        return symbol in self._vocabulary or (self._bytes and all(as_bytes))


AUDIT_EVERY = 10_000
"""Audited in each process: document 1, 10, 100, 1,000, and then every one of this many."""

AUDIT_BYTES = 1 << 18  # a longer one gives its turn to the next: the reference takes 0.5 s a MB


class TextEncoder:
    """An encoder with the rule for special tokens and the audit against the reference.

    Args:
        encoder: the plug-in.
        tokenizer: what it encodes with.
        special: "plain" encodes strings that spell a special token as ordinary text, "allow" lets
            them become that token, "error" refuses the document.
        reference: makes the reference encoder, or None: the plug-in is the reference.
        router: tells which documents are for the reference, or None: none is.
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: TokenizerSpec,
        special: SpecialPolicy,
        reference: Callable[[], Encoder] | None = None,
        router: ReferenceRouter | None = None,
    ) -> None:
        self.name = encoder.name
        self._encoder, self._router = encoder, router
        self._special = special
        self._scanner = Scanner(tokenizer.special_tokens)
        self._forbidden = special_ids(tokenizer)
        self._unknown = np.array([] if tokenizer.unk is None else [tokenizer.unk], np.uint32)
        self._lost = lost_characters(tokenizer)
        self._make_reference = reference
        self._made_reference: Encoder | None = None
        self._seen, self._due = 0, 1

    def encode(
        self,
        data: np.ndarray,
        offsets: np.ndarray,
        where: Callable[[int], str] = "document {} of the batch".format,
    ) -> Encoded:
        """Encode document bodies.

        Args:
            data: uint8[n], valid UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.
            where: names document k of this batch, for messages.

        Raises:
            InputError: a special token in the text, with `special="error"`.
            ValidationError: the encoder disagrees with the reference.
        """
        hits = self._scanner.hits(data, offsets)
        if hits and self._special == "error":
            document, token = min(hits)
            raise InputError(
                f"the text spells the special token {token}",
                where=where(document),
                fix="--special plain encodes it as ordinary text",
            )
        texts, failed = (data, offsets), dict[int, str]()
        routed = np.zeros(len(offsets) - 1, bool)
        if self._router is not None:
            routed = self._router.documents(data, offsets)
        made = self._by(self._encoder, texts, ~routed, failed)
        if self._make_reference is not None:
            if self._special != "allow":  # it parses what it should not: the reference does not
                routed |= count_ids(made, self._forbidden) > 0
            if routed.any():
                kept = chosen_of(made, ~routed)
                again = self._by(self._reference, texts, routed, failed)
                made = merged(routed, chosen_of(again, routed), kept)
        if self._special != "allow":
            made = self._without_special(made, failed)
        self._audit(texts, made, routed, failed, where)
        unknown = count_ids(made, self._unknown)
        if self._lost is not None:  # they have no token, and are as unknown as those that have
            unknown = unknown + self._lost(data, offsets)
        return Encoded(*made, len(hits), unknown, failed, int(routed.sum()))

    @property
    def _reference(self) -> Encoder:
        if self._made_reference is None:
            assert self._make_reference is not None
            self._made_reference = self._make_reference()
        return self._made_reference

    def _by(
        self, encoder: Encoder, texts: Texts, chosen: np.ndarray, failed: dict[int, str]
    ) -> Ids:
        """Encode the chosen documents (bool[d]); the others, and those that fail, have no ids."""
        if chosen.all():
            part = texts
        elif chosen.any():
            part = chosen_of(texts, chosen)
        else:
            return _nothing(len(chosen))
        try:
            made = encoder.encode(*part)
        except Unencodable as error:
            numbers, chosen = np.flatnonzero(chosen), chosen.copy()
            for k, why in error.why.items():
                failed[int(numbers[k])] = why
                chosen[numbers[k]] = False
            return self._by(encoder, texts, chosen, failed)
        return made if part is texts else merged(chosen, made, _nothing(int((~chosen).sum())))

    def _without_special(self, made: Ids, failed: dict[int, str]) -> Ids:
        """Take the ids of documents away in which the reference itself puts a special token.

        It does so where the file's unknown token is the end token, for one.
        """
        wrong = count_ids(made, self._forbidden) > 0
        if not wrong.any():
            return made
        for k in np.flatnonzero(wrong).tolist():
            ids = ids_of(made, k)
            failed[k] = f"it would hold the special token {ids[np.isin(ids, self._forbidden)][0]}"
        return merged(wrong, _nothing(int(wrong.sum())), chosen_of(made, ~wrong))

    def _audit(
        self,
        texts: Texts,
        made: Ids,
        routed: np.ndarray,
        failed: dict[int, str],
        where: Callable[[int], str],
    ) -> None:
        first, documents = self._seen + 1, len(routed)
        self._seen += documents
        if self._make_reference is None or self._seen < self._due:
            return
        fit = ~routed & (np.diff(texts[1]) <= AUDIT_BYTES)
        fit[list(failed)] = False
        for k in np.flatnonzero(fit).tolist():
            if first + k >= self._due:
                self._compare(texts, made, k, where)
                due = 1
                while due <= first + k:
                    due = due * 10 if due < AUDIT_EVERY else due + AUDIT_EVERY
                self._due = due

    def _compare(self, texts: Texts, made: Ids, k: int, where: Callable[[int], str]) -> None:
        text, got = ids_of(texts, k), ids_of(made, k)
        why = ""
        try:
            wanted, _ = self._reference.encode(text, np.array([0, len(text)], dtype=np.int64))
        except Unencodable as error:
            why = str(error)
        else:
            if not np.array_equal(wanted, got):
                why = first_difference(wanted, got)
        if why:
            raise ValidationError(
                f"the encoder {self.name} disagrees with the reference",
                where=where(k),
                why=why,
                fix="--encoder hf, and report this document",
            )


def _nothing(documents: int) -> Ids:
    return np.empty(0, np.uint32), np.zeros(documents + 1, np.int64)
