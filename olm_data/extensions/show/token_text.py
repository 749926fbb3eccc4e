"""The bytes and the text of single tokens, for byte-level tokenizers as a table.

    TokenizerSpec -> TokenBytes | None         id -> bytes, so that whole shards become text at once
    TokenizerSpec, ids -> token_texts          what each token adds to the text, for showing borders
    DocumentView -> trained_runs               the text, cut where trained tokens begin and end

A byte-level tokenizer (GPT-2 and its kin) has an exact table; of others only the library knows how
tokens join, and the text is that of `TokenizerSpec.decode`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter

import numpy as np
import pyarrow as pa
from msgspec import UNSET

from olm_data.rows.views import DocumentView
from olm_data.tokenizer.byte_alphabet import byte_alphabet
from olm_data.tokenizer.tokenizer import TokenizerSpec


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of every token.

    Attributes:
        data: uint8 [n], all tokens' bytes end to end.
        offsets: int64 [vocab_size + 1] into `data`; a hole in the vocabulary has no bytes.
    """

    data: np.ndarray
    offsets: np.ndarray

    def join(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of tokens end to end, and where each token's bytes end.

        Args:
            ids: [t], below the vocabulary size.

        Returns:
            uint8 [n], and int64 [t] cumulative ends.
        """
        joined = self._values.take(pa.array(ids))
        _, offsets, data = joined.buffers()
        ends = np.frombuffer(offsets, np.int64)[1 : len(ids) + 1]
        size = int(ends[-1]) if len(ends) else 0
        return np.frombuffer(data or b"", np.uint8)[:size], ends

    @cached_property
    def _values(self) -> pa.LargeBinaryArray:
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.large_binary(), len(self.offsets) - 1, buffers)

    def without(self, ids: Sequence[int]) -> TokenBytes:
        """Return the table with no bytes for some ids."""
        lengths = np.diff(self.offsets)
        gone = np.zeros(len(lengths), bool)
        gone[list(ids)] = True
        data = self.data[~np.repeat(gone, lengths)]
        offsets = np.concatenate([[0], np.cumsum(np.where(gone, 0, lengths))])
        return TokenBytes(data, offsets)


@lru_cache(maxsize=4)
def token_bytes(spec: TokenizerSpec) -> TokenBytes | None:
    """Return the table of a byte-level tokenizer, or None for any other."""
    model = json.loads(spec.json_bytes)
    if not _byte_level(model.get("decoder")):
        return None
    alphabet = byte_alphabet()
    added = {token["id"] for token in model.get("added_tokens") or []}
    pieces: list[bytes] = [b""] * spec.vocab_size
    for token, number in spec.reference.get_vocab(with_added_tokens=True).items():
        if number in added or not alphabet.keys() >= set(token):
            pieces[number] = token.encode()  # the decoder takes such a token as it is
        else:
            pieces[number] = bytes(alphabet[c] for c in token)
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return TokenBytes(np.frombuffer(b"".join(pieces), np.uint8), offsets)


def token_texts(spec: TokenizerSpec, ids: Sequence[int], table: TokenBytes | None) -> list[str]:
    """Return what each token adds to the text; together they are `spec.decode(ids)`.

    A character made of several tokens belongs to the last of them; the others add nothing. Where
    the borders cannot be told, all text is the first token's.

    Args:
        table: `token_bytes(spec)`.
    """
    if table is not None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        data, offsets = table.data, table.offsets
        texts = [decoder.decode(data[offsets[i] : offsets[i + 1]].tobytes()) for i in ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
    else:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        texts = [stream.step(spec.reference, int(i)) or "" for i in ids]
    whole = spec.decode(ids)
    if "".join(texts) == whole:
        return texts
    return [whole, *[""] * (len(ids) - 1)] if len(ids) else []


def trained_tokens(view: DocumentView) -> int:
    """Return how many of the tokens of a view are trained."""
    runs = [(0, len(view.ids))] if view.trained is UNSET else view.trained
    return sum(stop - start for start, stop in runs)


def trained_runs(
    view: DocumentView, spec: TokenizerSpec, low: int = 0, high: int | None = None
) -> list[tuple[str, bool]]:
    """Return characters [low, high) of the text of a view in stretches: (text, whether trained).

    Where all tokens are trained there is nothing to tell apart, and nothing is marked.
    """
    if view.trained is UNSET:
        return [(view.text[low:high], False)]
    trained = np.zeros(len(view.ids), bool)
    for start, stop in view.trained:
        trained[start:stop] = True
    last = len(view.ids) - int(view.eos)
    # a token has a byte at least, a character has four at most
    body = slice(int(view.bos), last if high is None else min(last, view.bos + 4 * high))
    sizes = [len(text) for text in token_texts(spec, view.ids[body], token_bytes(spec))]
    marks = np.repeat(trained[body], sizes).tolist()[low:high]
    pairs = groupby(zip(view.text[low:high], marks, strict=True), key=itemgetter(1))
    return [("".join(character for character, _ in run), marked) for marked, run in pairs]


def _byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        inner = decoder.get("decoders") or []
        return len(inner) == 1 and _byte_level(inner[0])
    return decoder.get("type") == "ByteLevel"
