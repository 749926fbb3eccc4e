"""The reference encoder: the `tokenizers` library, on one thread, in bounded memory.

    documents -> batches of at most 1 MiB of text -> encode_batch_fast -> uint32 arrays
                 a longer document -> proven pieces (segment.py) -> one after another
    documents in which text became a special token -> again, so that no text can spell one

Everything else is compared with this one; it decides what the right ids are. The last line is for
models whose vocabulary holds special tokens as pieces (Unigram, WordPiece, WordLevel): to the
library `</s>` in text is the token that ends a document.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from olm_data.dataset.choices import SpecialPolicy
from olm_data.encoders.base import Ids, Unencodable, chosen_of, count_ids, merged
from olm_data.encoders.segment import TARGET_BYTES, pieces
from olm_data.encoders.special import Scanner, special_ids
from olm_data.tokenizer.tokenizer import TokenizerSpec, failure, ids_or_none, open_reference

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class HfEncoder:
    """`tokenizers` on the calling thread; see `encoders.base.Encoder`.

    Args:
        normalize: False leaves the tokenizer's normaliser out: for the equality gate.
    """

    name = "hf"

    def __init__(
        self, tokenizer: TokenizerSpec, special: SpecialPolicy, *, normalize: bool = True
    ) -> None:
        # The library's own switch against its thread pool, read at each call: parallelism here is
        # one encoder a process, and a pool would multiply with that.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._spec, self._plain = tokenizer, special != "allow"
        if self._plain and normalize:
            self._tokenizer = tokenizer.reference
        else:
            data = tokenizer.encoder_json(strip_normalizer=not normalize)
            self._tokenizer = open_reference(data, plain=self._plain)
        self._forbidden = special_ids(tokenizer)
        self._unknown = np.array([] if tokenizer.unk is None else [tokenizer.unk], np.uint32)
        self._unknown_scanner = Scanner([tokenizer.unk_token] if tokenizer.unk_token else [])

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> Ids:
        """Encode documents; see `Encoder.encode`."""
        made = self._encode(self._tokenizer, data, offsets)
        if not self._plain:
            return made
        spelled = count_ids(made, self._forbidden) > 0
        unknown = count_ids(made, self._unknown) > 0
        if unknown.any():  # an unknown character, or text that spells the token for one
            for document, _ in self._unknown_scanner.hits(data, offsets):
                spelled[document] |= unknown[document]
        if not spelled.any():
            return made
        texts = chosen_of((data, offsets), spelled)
        try:
            again = self._encode(self._spec.unspellable, *texts)
        except Unencodable as error:
            numbers = np.flatnonzero(spelled)
            raise Unencodable({int(numbers[k]): why for k, why in error.why.items()}) from error
        return merged(spelled, again, chosen_of(made, ~spelled))

    def _encode(self, tokenizer: Tokenizer, data: np.ndarray, offsets: np.ndarray) -> Ids:
        counts = np.zeros(len(offsets), dtype=np.int64)
        parts: list[np.ndarray] = [np.empty(0, dtype=np.uint32)]
        failed: dict[int, str] = {}
        view = np.ascontiguousarray(data).data
        # Without a pre-tokenizer merges may reach across any cut: such a document stays whole.
        can_cut = tokenizer.pre_tokenizer is not None
        for first, stop in _groups(offsets, TARGET_BYTES):
            low, high = int(offsets[first]), int(offsets[stop])
            if can_cut and stop - first == 1 and high - low > TARGET_BYTES:
                rows = _pieces(tokenizer, view[low:high], first, failed)
                counts[first + 1] = sum(map(len, rows))
            else:
                texts = [
                    view[int(offsets[k]) : int(offsets[k + 1])].tobytes().decode()
                    for k in range(first, stop)
                ]
                rows = _rows(tokenizer, texts, first, failed)
                counts[first + 1 : stop + 1] = [len(row) for row in rows]
            parts += rows
        if failed:
            raise Unencodable(failed)
        return np.concatenate(parts), np.cumsum(counts)


def _rows(
    tokenizer: Tokenizer, texts: list[str], first: int, failed: dict[int, str]
) -> list[np.ndarray]:
    """Encode documents from `first` on; those the library fails on are named in `failed`."""
    try:
        made = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as error:
        why = failure(error)
        if why is None:
            raise
        if len(texts) == 1:
            failed[first] = why
            return [np.empty(0, dtype=np.uint32)]
        half = len(texts) // 2
        return _rows(tokenizer, texts[:half], first, failed) + _rows(
            tokenizer, texts[half:], first + half, failed
        )
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in made]


def _pieces(
    tokenizer: Tokenizer, text: memoryview, document: int, failed: dict[int, str]
) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    for piece in pieces(text, partial(ids_or_none, tokenizer)):
        rows += _rows(tokenizer, [piece.decode()], document, failed)
    return rows


def _groups(offsets: np.ndarray, target: int) -> Iterator[tuple[int, int]]:
    """Cut documents into runs of at most `target` bytes; a longer document is a run of its own."""
    first, documents = 0, len(offsets) - 1
    while first < documents:
        stop = int(np.searchsorted(offsets, offsets[first] + target, side="right")) - 1
        stop = min(max(stop, first + 1), documents)
        yield first, stop
        first = stop
