"""The reference encoder: the `tokenizers` library, on one thread, in bounded memory.

    documents -> batches of at most 1 MiB of text -> encode_batch_fast -> uint32 arrays
                 a longer document -> proven pieces (segment.py) -> one after another

Everything else is compared with this one; it decides what the right ids are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from olm_data.encoders.base import SpecialPolicy
from olm_data.encoders.segment import TARGET_BYTES, pieces
from olm_data.errors import InputError
from olm_data.tokenizer import TokenizerSpec, open_reference


class HfEncoder:
    """`tokenizers` on the calling thread; see `encoders.base.Encoder`."""

    name = "hf"

    def __init__(self, tokenizer: TokenizerSpec, special: SpecialPolicy) -> None:
        # The library's own switch against its thread pool, read at each call: parallelism here is
        # one encoder a process, and a pool would multiply with that.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = (
            open_reference(tokenizer.encoder_json(strip_special=False), plain=False)
            if special == "allow"
            else tokenizer.reference
        )
        # Without a pre-tokenizer merges may reach across any cut: such a document stays whole.
        self._can_cut = self._tokenizer.pre_tokenizer is not None

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents; see `Encoder.encode`.

        Raises:
            InputError: the library fails on a document (it panics on some texts with some files).
        """
        counts = np.zeros(len(offsets), dtype=np.int64)
        parts: list[np.ndarray] = [np.empty(0, dtype=np.uint32)]
        view = np.ascontiguousarray(data).data
        for first, stop in _groups(offsets, TARGET_BYTES):
            low, high = int(offsets[first]), int(offsets[stop])
            if self._can_cut and stop - first == 1 and high - low > TARGET_BYTES:
                rows = [
                    self._batch([piece])[0] for piece in pieces(view[low:high], self._short_ids)
                ]
                counts[first + 1] = sum(map(len, rows))
            else:
                rows = self._batch(
                    [
                        view[int(offsets[k]) : int(offsets[k + 1])].tobytes()
                        for k in range(first, stop)
                    ]
                )
                counts[first + 1 : stop + 1] = [len(row) for row in rows]
            parts += rows
        return np.concatenate(parts), np.cumsum(counts)

    def _batch(self, texts: list[bytes]) -> list[np.ndarray]:
        try:
            encodings = self._tokenizer.encode_batch_fast(
                [text.decode() for text in texts], add_special_tokens=False
            )
        except BaseException as error:  # a Rust panic is no Exception; anything else goes on
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise InputError(
                    "the tokenizers library failed on a document",
                    why=str(error).splitlines()[0][:300],
                    fix="find it with a smaller input, and report it to the library",
                ) from error
            raise
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def _short_ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _groups(offsets: np.ndarray, target: int) -> Iterator[tuple[int, int]]:
    """Cut documents into runs of at most `target` bytes; a longer document is a run of its own."""
    first, documents = 0, len(offsets) - 1
    while first < documents:
        stop = int(np.searchsorted(offsets, offsets[first] + target, side="right")) - 1
        stop = min(max(stop, first + 1), documents)
        yield first, stop
        first = stop
