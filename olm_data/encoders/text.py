"""What every run does around an encoder: routing, the rule for special tokens, and the audit.

text -> Scanner (count, or refuse) -> proved of it? -> Encoder.encode   -> special id in a body?
                                      else          -> reference        -> then by the reference
     -> documents nobody can encode are named, unknown tokens counted
     -> first, 10th, 100th, ... document: as the reference?

How many characters a BPE model without unknown token leaves out of a text, in silence.

    text -> the file's normaliser -> its pre-tokenizer -> words -> symbols the vocabulary lacks

The library drops such symbols (BPE::merge_word of tokenizers); all other model types give an
unknown token or fail. Not used for a model that has an unknown token, or bytes for all characters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from olm_data.dataset.inputs import SpecialPolicy
from olm_data.encoders.base import (
    Encoded,
    Encoder,
    Ids,
    Scanner,
    Texts,
    Unencodable,
    chosen_of,
    count_ids,
    first_difference,
    ids_of,
    merged,
    special_ids,
)
from olm_data.encoders.code_points import Router
from olm_data.errors import InputError, ValidationError
from olm_data.tokenizer.definition import BpeModel, Definition
from olm_data.tokenizer.tokenizer import TokenizerSpec


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
        self._known: dict[tuple[str, bool, bool], bool] = {}

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

    def _has(self, letter: str, first: bool, last: bool) -> bool:
        key = (letter, first, last)
        if key not in self._known:
            symbol = ("" if first else self._prefix) + letter + (self._suffix if last else "")
            as_bytes = (f"<0x{byte:02X}>" in self._vocabulary for byte in symbol.encode())
            found = symbol in self._vocabulary or (self._bytes and all(as_bytes))
            self._known[key] = found
        return self._known[key]


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
        router: Router | None = None,
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
