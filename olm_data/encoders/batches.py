"""Batches of documents as buffers, before (text) and after (ids): taken apart and put together."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Texts = tuple[np.ndarray, np.ndarray]
"""UTF-8 of documents, concatenated, uint8[n], and their offsets int64[d + 1]."""

Ids = tuple[np.ndarray, np.ndarray]
"""ids of documents, concatenated, uint32[t], and their offsets int64[d + 1]."""


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
