"""The reference encoder: the `tokenizers` library, on one thread, in bounded memory.

    documents -> batches of at most 1 MiB of text -> encode_batch_fast -> uint32 arrays
                 a longer document -> proven pieces -> one after another
    documents in which text became a special token -> again, so that no text can spell one

Everything else is compared with this one; it decides what the right ids are. The last line is for
models whose vocabulary holds special tokens as pieces (Unigram, WordPiece, WordLevel): to the
library `</s>` in text is the token that ends a document.

Safe cuts in long documents: pieces whose ids, joined, are the ids of the whole document.

The reference library needs memory in proportion to the text it is given at once (about 100 bytes
a token), so a very long document is encoded in pieces. A place is a candidate where an ASCII letter
is followed by a space and another ASCII letter: every pre-tokenizer in use ends a pre-token there.
A candidate becomes a cut only if the tokenizer itself shows it on the text around it:
ids(left + right) == ids(left) + ids(right). A stretch without a proven cut (a megabyte of one
character) stays in one piece.

    start -> look for candidates from start + target on -> prove one -> cut -> next piece
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from olm_data.dataset.inputs import SpecialPolicy
from olm_data.encoders.base import (
    Ids,
    Scanner,
    Unencodable,
    chosen_of,
    count_ids,
    merged,
    special_ids,
)
from olm_data.tokenizer.tokenizer import TokenizerSpec, failure, ids_or_none, open_reference

if TYPE_CHECKING:
    from tokenizers import Tokenizer


TARGET_BYTES = 1 << 20  # pieces are about this long; longer documents are cut
WINDOW_BYTES = 256  # text on each side of a candidate that has to agree
TRIES = 16  # candidates tried before the piece is made longer by another TARGET_BYTES

_CANDIDATE = re.compile(rb"[A-Za-z](?= [A-Za-z])")

Encode = Callable[[str], list[int] | None]


def pieces(text: memoryview, encode: Encode, target: int = TARGET_BYTES) -> Iterator[bytes]:
    """Cut one document's UTF-8 into pieces that encode independently.

    Args:
        text: the UTF-8 bytes.
        encode: ids of a short text, or None where there are none: nothing is proved there.
        target: wanted bytes of a piece.

    Yields:
        the pieces in order; their concatenation is `text`.
    """
    start, total = 0, len(text)
    look = target
    while total - start > look:
        cut = _proven_cut(text, start, start + look, min(start + look + target, total), encode)
        if cut is None:
            look += target
            continue
        yield bytes(text[start:cut])
        start, look = cut, target
    yield bytes(text[start:])


def _proven_cut(text: memoryview, start: int, low: int, high: int, encode: Encode) -> int | None:
    for tried, match in enumerate(_CANDIDATE.finditer(text, low, high)):
        if tried == TRIES:
            return None
        cut = match.end()
        # without the characters that the ends of the windows cut
        left = bytes(text[max(start, cut - WINDOW_BYTES) : cut]).decode(errors="ignore")
        right = bytes(text[cut : cut + WINDOW_BYTES]).decode(errors="ignore")
        whole, one, other = encode(left + right), encode(left), encode(right)
        if one is not None and other is not None and whole == one + other:
            return cut
    return None


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
                rows = []
                for piece in pieces(view[low:high], partial(ids_or_none, tokenizer)):
                    rows += _rows(tokenizer, [piece.decode()], first, failed)
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


def _groups(offsets: np.ndarray, target: int) -> Iterator[tuple[int, int]]:
    """Cut documents into runs of at most `target` bytes; a longer document is a run of its own."""
    first, documents = 0, len(offsets) - 1
    while first < documents:
        stop = int(np.searchsorted(offsets, offsets[first] + target, side="right")) - 1
        stop = min(max(stop, first + 1), documents)
        yield first, stop
        first = stop
