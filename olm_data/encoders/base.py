"""The encoder protocol: buffers of text in, buffers of token ids out.

An encoder plug-in turns text into the ids of document bodies. It adds no BOS and no EOS, truncates
and pads nothing, and works on one thread. `TextEncoder` wraps a plug-in with what holds for all of
them: what is not proved goes to the reference, strings that spell a special token are counted and
treated as `--special` says, and no id of a special token is let through in "plain" mode.

    data uint8[n], offsets int64[d + 1]  ->  Encoder.encode  ->  ids uint32[t], offsets int64[d + 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np


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

        Raises:
            Unencodable: some documents cannot be encoded; the others can.
        """
        ...


class Unencodable(Exception):
    """Documents of a batch that an encoder cannot encode.

    Attributes:
        why: document -> reason.
    """

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__(f"{len(why)} documents: {next(iter(why.values()))}")
        self.why = why


class Encoded(NamedTuple):
    """Token ids of a batch of documents.

    Attributes:
        ids: uint32[t], document bodies one after another.
        offsets: int64[d + 1], rising from 0 to t.
        special_hits: number of strings in the text that spell a special token.
        unknown: int64[d], unknown tokens of each document.
        failed: document -> why it cannot be encoded; it has no ids.
        by_reference: documents that were given to the reference as nothing is proved of them.
    """

    ids: np.ndarray
    offsets: np.ndarray
    special_hits: int
    unknown: np.ndarray
    failed: Mapping[int, str]
    by_reference: int
