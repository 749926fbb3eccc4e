"""The encoder protocol: buffers of text in, buffers of token ids out.

An encoder plug-in turns text into the ids of document bodies. It adds no BOS and no EOS, truncates
and pads nothing, and works on one thread. `TextEncoder` wraps a plug-in with what holds for all of
them: strings that spell a special token are counted and treated as `--special` says, and no id of a
special token is let through in "plain" mode.

    data uint8[n], offsets int64[d + 1]  ->  Encoder.encode  ->  ids uint32[t], offsets int64[d + 1]
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np

SpecialPolicy = Literal["plain", "allow", "error"]


class Encoder(Protocol):
    """A way to turn text into ids: `hf` (the reference) or `gigatoken`."""

    name: str

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents.

        Args:
            data: uint8[n], valid UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.

        Returns:
            ids uint32[t] and their offsets int64[d + 1], rising from 0 to t; bodies only.
        """
        ...


class Encoded(NamedTuple):
    """Token ids of a batch of documents.

    Attributes:
        ids: uint32[t], document bodies one after another.
        offsets: int64[d + 1], rising from 0 to t.
        special_hits: number of strings in the text that spell a special token.
    """

    ids: np.ndarray
    offsets: np.ndarray
    special_hits: int
