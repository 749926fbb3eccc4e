"""Which documents a fast encoder may encode: those whose ids are proved to be the reference's.

    tokenizer without its normaliser -> fast encoder
    document -> holds a routed code point?                                    -> reference
             -> holds an unsettled one, and the reference's normaliser changes it -> reference
             -> else: normalised as it is, every code point proved            -> fast encoder

So no normaliser but the reference's own decides anything: a fast encoder whose Unicode tables are
older or newer never sees a text that would be normalised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from olm_data.encoders.code_points import CodePoints, Ranges, unsettled

if TYPE_CHECKING:
    from olm_data.tokenizer.tokenizer import TokenizerSpec

LONGEST = (
    1 << 20
)  # bytes of a document that is normalised to see if it changes; takes 20 times that


class Router:
    """Finds the documents of a batch that are for the reference.

    Args:
        tokenizer: the tokenizer.
        routed: code points on which the fast encoder differs.
    """

    def __init__(self, tokenizer: TokenizerSpec, routed: Ranges) -> None:
        self._routed = CodePoints(routed)
        self._normalizer = None
        if tokenizer.form is not None:
            self._unsettled = CodePoints(unsettled(tokenizer.form))
            self._normalizer = tokenizer.reference.normalizer

    def documents(self, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return which documents are for the reference: bool[d].

        Args:
            data: uint8[n], valid UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.
        """
        chosen = self._routed.documents(data, offsets)
        if self._normalizer is not None:
            doubtful = self._unsettled.documents(data, offsets) & ~chosen
            for k in np.flatnonzero(doubtful).tolist():
                chosen[k] = self._changes(data[offsets[k] : offsets[k + 1]])
        return chosen

    def _changes(self, document: np.ndarray) -> bool:
        if len(document) > LONGEST:
            return True
        text = document.tobytes().decode()
        assert self._normalizer is not None
        return bool(self._normalizer.normalize_str(text) != text)
