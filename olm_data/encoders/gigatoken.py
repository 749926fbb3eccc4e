"""The fast encoder: the `gigatoken` library over buffers, without a Python string or list.

    data, offsets -> awkward string array (a view) -> gigatoken, one thread -> ids, offsets (views)

The library parses special tokens inside text, so in "plain" mode it is given the tokenizer without
them. It is never trusted: `encoders.choose` compares it with `hf` before a run, and `TextEncoder`
audits it during the run.
"""

from __future__ import annotations

import numpy as np

from olm_data.encoders.base import SpecialPolicy
from olm_data.errors import UsageError
from olm_data.tokenizer import TokenizerSpec


class GigatokenEncoder:
    """`gigatoken` on one thread; see `encoders.base.Encoder`.

    Raises:
        UsageError: the library is not installed.
        UnsupportedTokenizer: it cannot load this tokenizer.
    """

    name = "gigatoken"

    def __init__(self, tokenizer: TokenizerSpec, special: SpecialPolicy) -> None:
        try:
            import awkward
            import gigatoken
        except ImportError as error:
            raise UsageError(
                "the gigatoken encoder is not installed",
                where="--encoder gigatoken",
                fix="pip install 'olm[fast]', or --encoder hf",
            ) from error
        self._ak = awkward
        data = tokenizer.encoder_json(strip_special=special != "allow")
        try:
            self._tokenizer = gigatoken.Tokenizer.from_json(data)
        except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
            raise UnsupportedTokenizer(
                f"gigatoken cannot load the tokenizer {tokenizer.name}",
                where="--encoder gigatoken",
                why=str(error).splitlines()[0][:300],
                fix="--encoder hf",
            ) from error

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents; see `Encoder.encode`."""
        contents, index = self._ak.contents, self._ak.index
        strings = contents.ListOffsetArray(
            index.Index64(offsets),
            contents.NumpyArray(data, parameters={"__array__": "char"}),
            parameters={"__array__": "string"},
        )
        layout = self._tokenizer.encode_batch(self._ak.Array(strings), parallel=False).layout
        starts = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data)[starts[0] : starts[-1]]
        return ids, starts - starts[0] if starts[0] else starts


class UnsupportedTokenizer(UsageError):
    """An encoder that is installed cannot load this tokenizer."""
