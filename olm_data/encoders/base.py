"""The encoder protocol, and its buffers: text in, token ids out.

An encoder plug-in turns text into the ids of document bodies. It adds no BOS and no EOS, truncates
and pads nothing, and works on one thread. `TextEncoder` wraps a plug-in with what holds for all of
them: what is not proved goes to the reference, strings that spell a special token are counted and
treated as `--special` says, and no id of a special token is let through in "plain" mode.

    data uint8[n], offsets int64[d + 1]  ->  Encoder.encode  ->  ids uint32[t], offsets int64[d + 1]
    bytes of documents -> concatenate        chosen_of, merged: taken apart and put together
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

Texts = tuple[np.ndarray, np.ndarray]
"""UTF-8 of documents, concatenated, uint8[n], and their offsets int64[d + 1]."""

Ids = tuple[np.ndarray, np.ndarray]
"""ids of documents, concatenated, uint32[t], and their offsets int64[d + 1]."""


class Encoder(Protocol):
    """A way to turn text into ids: `hf` (the reference) or `gigatoken`."""

    name: str

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> Ids:
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


def concatenate(texts: Iterable[bytes]) -> Texts:
    """Return the buffers of documents given as bytes."""
    rows = list(texts)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.frombuffer(b"".join(rows), dtype=np.uint8), offsets


def chosen_of(batch: Texts | Ids, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen documents (bool[d]) of a batch, in order."""
    values, offsets = batch
    lengths = np.diff(offsets)
    ends = np.cumsum(lengths[chosen])
    return values[np.repeat(chosen, lengths)], np.concatenate([np.zeros(1, np.int64), ends])


def merged(chosen: np.ndarray, one: Ids, other: Ids) -> Ids:
    """Return the batch whose documents are those of `one` where `chosen` (bool[d]), of `other`
    elsewhere."""
    lengths = np.zeros(len(chosen), np.int64)
    lengths[chosen], lengths[~chosen] = np.diff(one[1]), np.diff(other[1])
    ids = np.empty(int(lengths.sum()), np.uint32)
    mine = np.repeat(chosen, lengths)
    ids[mine], ids[~mine] = one[0], other[0]
    return ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def ids_of(made: Ids, k: int) -> np.ndarray:
    """Return the ids of document k."""
    ids, offsets = made
    return ids[offsets[k] : offsets[k + 1]]


def count_ids(made: Ids, wanted: np.ndarray) -> np.ndarray:
    """Return how many of the ids of each document are among `wanted` (uint32, ascending): int64[d].

    The wanted ids are few and mostly above all others, so the first comparison is nearly always
    all there is to do.
    """
    ids, offsets = made
    counts = np.zeros(len(offsets) - 1, np.int64)
    if len(wanted) and len(ids):
        at = np.flatnonzero((ids >= wanted[0]) & (ids <= wanted[-1]))
        at = at[np.isin(ids[at], wanted)] if len(at) else at
        np.add.at(counts, np.searchsorted(offsets, at, side="right") - 1, 1)
    return counts
