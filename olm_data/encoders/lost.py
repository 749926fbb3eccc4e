"""How many characters a BPE model without unknown token leaves out of a text, in silence.

    text -> the file's normaliser -> its pre-tokenizer -> words -> symbols the vocabulary lacks

The library drops such symbols (BPE::merge_word of tokenizers); all other model types give an
unknown token or fail. Not used for a model that has an unknown token, or bytes for all characters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
