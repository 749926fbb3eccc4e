"""Order `windowed`: each epoch of a source goes through a few chunks at a time. Pure.

    chunks of c rows, permuted -> windows of w chunks, one after another -> rows permuted in each

A chunk is c neighbouring rows of the source; the rows behind the last whole chunk come at the end
of the epoch. Whoever reads a window needs the data of its chunks only, so a cache of a few shards
is enough for a source of any size. The state stays what it is in the global order: one integer.
docs/reference/mixture.md is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import Size
from olm_data.config.hints import Count
from olm_data.errors import UsageError
from olm_data.order.base import Int64, Order, OrderKeys, SourceEpochs, SourceSize
from olm_data.order.prp import ROUNDS, mix64, permute, unpermute

DEFAULT_WINDOW_CHUNKS = 16
MOST_WINDOW_CHUNKS = 1 << 16


class WindowedKeys(OrderKeys, frozen=True):
    """`order: windowed` in a manifest.

    Attributes:
        window_chunks: chunks of a window.
        chunk_tokens: tokens of a chunk; None: as many as a shard of the source has on average.
    """

    name: ClassVar[str] = "windowed"

    window_chunks: Annotated[int, msgspec.Meta(ge=1, le=MOST_WINDOW_CHUNKS)] = DEFAULT_WINDOW_CHUNKS
    chunk_tokens: Count | None = None

    @classmethod
    def check(cls, packing: str, views: Sequence[bool]) -> None:
        """Refuse rows whose documents come from everywhere."""
        if packing == "best_fit":
            raise UsageError(
                "order: windowed does not go with packing: best_fit",
                why="a row of best_fit takes its documents from millions around, so neighbouring "
                "rows need data from everywhere and a small cache would not do",
                fix="write packing: concat or packing: document, or leave order out",
            )

    def compile(self, sources: Sequence[SourceSize]) -> Windowed:
        """Return the order with the chunks of each source."""
        chunks = []
        for source in sources:
            tokens = self.chunk_tokens or source.tokens // source.shards
            wanted = round(Fraction(tokens * source.rows, source.tokens))
            chunks.append(min(source.rows, max(1, wanted)))
        return Windowed(window_chunks=self.window_chunks, chunk_rows=tuple(chunks))


class Windowed(Order, frozen=True):
    """How far apart the rows of a window may lie.

    Attributes:
        window_chunks: w, chunks of a window; at most 65,536.
        chunk_rows: c of each source, in the order of the lock's sources; at most its rows.
    """

    name: ClassVar[str] = "windowed"
    keys: ClassVar[type[OrderKeys] | None] = WindowedKeys
    partial_cache: ClassVar[bool] = True

    window_chunks: Size
    chunk_rows: tuple[Size, ...]

    def rows_at(self, positions: Int64, epochs: SourceEpochs) -> Int64:
        """Return the rows at positions of an epoch."""
        return permute_windowed(positions, epochs.rows, *self._sizes(epochs), epochs.keys())

    def positions_of(self, rows: Int64, epochs: SourceEpochs) -> Int64:
        """Return where rows stand in an epoch."""
        return unpermute_windowed(rows, epochs.rows, *self._sizes(epochs), epochs.keys())

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether each source has chunks of 1 to all its rows."""
        return (
            len(self.chunk_rows) == len(rows)
            and 1 <= self.window_chunks <= MOST_WINDOW_CHUNKS
            and all(1 <= c <= max(n, 1) for c, n in zip(self.chunk_rows, rows, strict=True))
        )

    def for_source(self, source: int) -> Windowed:
        """Return the window and the chunks of one source."""
        return Windowed(window_chunks=self.window_chunks, chunk_rows=(self.chunk_rows[source],))

    def join(self, others: Sequence[Windowed]) -> Windowed:
        """Return the order of several sources, each with its chunks."""
        chunks = tuple(c for order in (self, *others) for c in order.chunk_rows)
        return Windowed(window_chunks=self.window_chunks, chunk_rows=chunks)

    def cache_bytes(
        self, source: int, sequence_length: int, token_ends: Int64, shard_bytes: Int64
    ) -> int:
        """Return a bound on the bytes of the shards that a window of a source touches."""
        chunk_tokens = self.chunk_rows[source] * sequence_length
        total = int(token_ends[-1])
        starts = np.arange(0, total, max(1, min(chunk_tokens, total)), dtype=np.int64)
        first = np.searchsorted(token_ends, starts, side="right")
        # one token more: the last label of a chunk is the first token after it
        stops = np.minimum(starts + chunk_tokens, total - 1)
        last = np.searchsorted(token_ends, stops, side="right")
        before = np.append(0, np.cumsum(shard_bytes))
        touched = np.sort(before[last + 1] - before[first])[::-1]
        # the last, shorter chunk stands at the end, with the window before it
        return min(int(before[-1]), int(touched[: self.window_chunks + 1].sum()))

    def cache_warning(self, source: int, rows: int, row_bytes: int, total_bytes: int) -> str | None:
        """Return a warning where one window may touch all, though one chunk would not."""
        chunk = self.chunk_rows[source]
        if 2 * self.window_chunks * chunk * row_bytes < total_bytes or 2 * chunk >= rows:
            return None
        return (
            f"one window of {self.window_chunks} chunks may touch all of its shards "
            f"({total_bytes / 1e9:,.1f} GB): a smaller window_chunks would need less room in the "
            "training cache"
        )

    def _sizes(self, epochs: SourceEpochs) -> tuple[Int64, int]:
        """Return int64 [m], rows of a chunk of each source, and chunks of a window."""
        return np.array(self.chunk_rows, np.int64)[epochs.source], self.window_chunks


def permute_windowed(p: Any, n: Any, c: Any, w: int, keys: NDArray[np.uint64]) -> Int64:
    """Return the rows at positions `p` of an epoch.

    Args:
        p: integers in range(n), any shape.
        n: rows of the source, 1 .. 2^62, scalar or broadcast against `p`.
        c: rows of a chunk, 1 .. n, likewise.
        w: chunks of a window.
        keys: uint64[6], or uint64[..., 6] with one row of keys for each element of `p`.

    Returns:
        int64 array of the broadcast shape of `p`, `n` and `c`.

    Raises:
        IndexError: a position outside its source.
    """
    p, n, c, keys = _flat(p, n, c, keys)
    shape = p.shape
    first, size, window = _window(p.reshape(-1), n, c, w)
    inner = first + permute(p.reshape(-1) - first, size, window_keys(keys, window))
    chunk, inside = np.divmod(inner, c)
    whole = chunk < n // c
    if whole.any():
        chunk[whole] = permute(chunk[whole], (n // c)[whole], keys[whole])
    result: Int64 = (chunk * c + inside).reshape(shape)
    return result


def unpermute_windowed(row: Any, n: Any, c: Any, w: int, keys: NDArray[np.uint64]) -> Int64:
    """The exact inverse of `permute_windowed`, with the same arguments."""
    row, n, c, keys = _flat(row, n, c, keys)
    shape = row.shape
    chunk, inside = np.divmod(row.reshape(-1), c)
    whole = chunk < n // c
    if whole.any():
        chunk[whole] = unpermute(chunk[whole], (n // c)[whole], keys[whole])
    inner = chunk * c + inside
    first, size, window = _window(inner, n, c, w)
    result: Int64 = (first + unpermute(inner - first, size, window_keys(keys, window))).reshape(
        shape
    )
    return result


def _flat(x: Any, n: Any, c: Any, keys: NDArray[np.uint64]) -> tuple[Any, ...]:
    """Return x in its broadcast shape, and for each of its elements n, c [m] and keys [m, 6]."""
    x, n, c = np.broadcast_arrays(*(np.asarray(v, dtype=np.int64) for v in (x, n, c)))
    if ((x < 0) | (x >= n)).any():
        raise IndexError("a position is outside its permutation")
    keys = np.broadcast_to(keys, (*x.shape, ROUNDS)).reshape(-1, ROUNDS)
    return x, n.reshape(-1), c.reshape(-1), keys


def _window(position: Int64, n: Int64, c: Int64, w: int) -> tuple[Int64, Int64, Int64]:
    """Return first position, size and number of the window of each position."""
    # A window that would be longer than the source is the whole source; so nothing overflows.
    span = np.where(c > n // w, n, c * w)
    number = position // span
    return number * span, np.minimum(span, n - number * span), number


def window_keys(keys: NDArray[np.uint64], window: Int64) -> NDArray[np.uint64]:
    """Return the round keys [m, 6] inside windows [m]; those of chunks are `keys` themselves."""
    return mix64(keys + (window + 1).astype(np.uint64)[:, None])
