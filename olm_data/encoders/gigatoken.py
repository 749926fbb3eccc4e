"""The fast encoder: the `gigatoken` library over buffers, without a Python string or list.

    data, offsets -> awkward string array (a view) -> gigatoken, one thread -> ids, offsets (views)

The library parses special tokens inside text, so in "plain" mode it is given the tokenizer without
them; and without a Unicode normaliser, as `ReferenceRouter` keeps text from it that would be
normalised. It is never trusted: the equality gate compares it with `hf` before a run, `TextEncoder`
during it.
"""

from __future__ import annotations

import numpy as np

from olm_data.dataset.inputs import SpecialPolicy
from olm_data.errors import UsageError, ValidationError
from olm_data.extras import needs
from olm_data.tokenizer.tokenizer import TokenizerSpec, library_errors


class GigatokenEncoder:
    """`gigatoken` on one thread; see `encoders.base.Encoder`.

    Raises:
        UsageError: the library is not installed.
        UnsupportedTokenizer: it cannot load this tokenizer.
    """

    name = "gigatoken"

    def __init__(self, tokenizer: TokenizerSpec, special: SpecialPolicy) -> None:
        with needs("the fast encoder", where="--encoder gigatoken; --encoder hf needs nothing"):
            import awkward
            import gigatoken
        self._ak = awkward
        data = tokenizer.encoder_json(
            strip_special=special != "allow", strip_normalizer=tokenizer.form is not None
        )
        what = f"gigatoken cannot load the tokenizer {tokenizer.name}"
        with library_errors(
            what, "--encoder gigatoken", kind=UnsupportedTokenizer, fix="--encoder hf"
        ):
            self._tokenizer = gigatoken.Tokenizer.from_json(data)

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents; see `Encoder.encode`.

        Raises:
            ValidationError: the library fails, by an exception or a panic.
        """
        contents, index = self._ak.contents, self._ak.index
        strings = contents.ListOffsetArray(
            index.Index64(offsets),
            contents.NumpyArray(data, parameters={"__array__": "char"}),
            parameters={"__array__": "string"},
        )
        with library_errors(
            "the encoder gigatoken fails on the text",
            f"a batch of {len(offsets) - 1:,} documents",
            kind=ValidationError,
            fix="--encoder hf",
        ):
            layout = self._tokenizer.encode_batch(self._ak.Array(strings), parallel=False).layout
        starts = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data)[starts[0] : starts[-1]]
        return ids, starts - starts[0] if starts[0] else starts


class UnsupportedTokenizer(UsageError):
    """An encoder that is installed cannot load this tokenizer."""
