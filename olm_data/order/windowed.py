"""Order `windowed`: each epoch of a source goes through a few chunks at a time. Pure.

    chunks of c rows, permuted -> windows of w chunks, one after another -> rows permuted in each

A chunk is c neighbouring rows of the source; the rows behind the last whole chunk come at the end
of the epoch. Whoever reads a window needs the data of its chunks only, so a cache of a few shards
is enough for a source of any size. The state stays what it is in the global order: one integer.
docs/reference/mixture.md is the specification. Never: a table of the dataset's size, files, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import Size
from olm_data.order.prp import ROUNDS, mix64, permute, unpermute

Int64 = NDArray[np.int64]
DEFAULT_WINDOW_CHUNKS = 16
MOST_WINDOW_CHUNKS = 1 << 16


class Windowed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far apart the rows of a window may lie.

    Attributes:
        window_chunks: w, chunks of a window; at most 65,536.
        chunk_rows: c of each source, in the order of the lock's sources; at most its rows.
    """

    window_chunks: Size
    chunk_rows: tuple[Size, ...]

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether this can be an order of sources with so many rows each."""
        return (
            len(self.chunk_rows) == len(rows)
            and 1 <= self.window_chunks <= MOST_WINDOW_CHUNKS
            and all(1 <= c <= max(n, 1) for c, n in zip(self.chunk_rows, rows, strict=True))
        )


def permute_windowed(p: Any, n: Any, c: Any, w: int, keys: NDArray[np.uint64]) -> Int64:
    """Return the rows at places `p` of an epoch.

    Args:
        p: integers in range(n), any shape.
        n: rows of the source, 1 .. 2^62, scalar or broadcast against `p`.
        c: rows of a chunk, 1 .. n, likewise.
        w: chunks of a window.
        keys: uint64[6], or uint64[..., 6] with one row of keys for each element of `p`.

    Returns:
        int64 array of the broadcast shape of `p`, `n` and `c`.

    Raises:
        IndexError: a place outside its source.
    """
    p, n, c, keys = _flat(p, n, c, keys)
    shape = p.shape
    first, size, window = _window(p.reshape(-1), n, c, w)
    place = first + permute(p.reshape(-1) - first, size, _keys_of(keys, window))
    chunk, inside = np.divmod(place, c)
    whole = chunk < n // c
    if whole.any():
        chunk[whole] = permute(chunk[whole], (n // c)[whole], keys[whole])
    return (chunk * c + inside).reshape(shape)


def unpermute_windowed(row: Any, n: Any, c: Any, w: int, keys: NDArray[np.uint64]) -> Int64:
    """The exact inverse of `permute_windowed`, with the same arguments."""
    row, n, c, keys = _flat(row, n, c, keys)
    shape = row.shape
    chunk, inside = np.divmod(row.reshape(-1), c)
    whole = chunk < n // c
    if whole.any():
        chunk[whole] = unpermute(chunk[whole], (n // c)[whole], keys[whole])
    place = chunk * c + inside
    first, size, window = _window(place, n, c, w)
    return (first + unpermute(place - first, size, _keys_of(keys, window))).reshape(shape)


def _flat(x: Any, n: Any, c: Any, keys: NDArray[np.uint64]) -> tuple[Any, ...]:
    """Return x in its broadcast shape, and for each of its elements n, c [m] and keys [m, 6]."""
    x, n, c = np.broadcast_arrays(*(np.asarray(v, dtype=np.int64) for v in (x, n, c)))
    if ((x < 0) | (x >= n)).any():
        raise IndexError("a position is outside its permutation")
    keys = np.broadcast_to(keys, (*x.shape, ROUNDS)).reshape(-1, ROUNDS)
    return x, n.reshape(-1), c.reshape(-1), keys


def _window(place: Int64, n: Int64, c: Int64, w: int) -> tuple[Int64, Int64, Int64]:
    """Return first place, size and number of the window of each place."""
    # A window that would be longer than the source is the whole source; so nothing overflows.
    span = np.where(c > n // w, n, c * w)
    number = place // span
    return number * span, np.minimum(span, n - number * span), number


def _keys_of(keys: NDArray[np.uint64], window: Int64) -> NDArray[np.uint64]:
    """Return the round keys [m, 6] inside windows [m]; those of chunks are `keys` themselves."""
    return mix64(keys + (window + 1).astype(np.uint64)[:, None])
