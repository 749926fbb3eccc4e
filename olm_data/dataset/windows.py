"""How many documents can begin in a window of so many tokens: bounds for batches of a fixed shape.

    ends of a shard --window_counts--> record --stream_windows--> manifest
    manifest --documents_bound--> shapes of batches

Counted for windows of 64, 128, ... 1,048,576 tokens. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from olm_data.bounded_json import Size

WINDOWS = tuple(1 << k for k in range(6, 21))
WIDTHS = {str(width) for width in WINDOWS}
Counts = tuple[Size, Size, Size]
"""Most document starts in a window of a shard, in its first window, in its last."""


def window_counts(ends: np.ndarray) -> dict[str, Counts]:
    """Count document starts in windows of 64, 128, ... tokens of one shard.

    Args:
        ends: uint64 [documents], cumulative document ends in tokens.

    Returns:
        width -> [most starts in any window, starts in the first, in the last `width` tokens], up to
        the first width that covers the shard.
    """
    if not len(ends):
        return {}
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    tokens, rank = int(ends[-1]), np.arange(len(starts))
    counts = {}
    for width in WINDOWS:
        most = int((np.searchsorted(starts, starts + width) - rank).max())
        first = int(np.searchsorted(starts, width))
        last = len(starts) - int(np.searchsorted(starts, tokens - width))
        counts[str(width)] = (most, first, last)
        if width >= tokens:
            break
    return counts


def stream_windows(shards: Sequence[tuple[int, int, Mapping[str, Counts]]]) -> dict[str, int]:
    """Bound document starts in any window of a dataset's tokens.

    Args:
        shards: (tokens, documents, `window_counts`) of each shard, in order.

    Returns:
        width -> most starts, up to the first width that covers the dataset.
    """
    if not shards:
        return {}
    tokens = np.array([tokens for tokens, _, _ in shards], np.int64)
    documents = np.array([documents for _, documents, _ in shards], np.int64)
    token_ends, document_ends = np.cumsum(tokens), np.cumsum(documents)
    bounds: dict[str, int] = {}
    for width in WINDOWS:
        # a shard shorter than the window has no entry for it: all its documents may be inside
        inside, first, last = (
            np.array([w.get(str(width), (d, d, d))[i] for _, d, w in shards], np.int64)
            for i in range(3)
        )
        # a window that starts in shard i ends at the latest in shard j, with all between inside it
        index = np.arange(len(shards))
        j = np.minimum(np.searchsorted(token_ends, token_ends + width - 1), len(shards) - 1)
        across = last + (document_ends[j] - documents[j] - document_ends) + first[j]
        bounds[str(width)] = int(max(inside.max(), np.where(j > index, across, 0).max()))
        if width >= token_ends[-1]:
            break
    return bounds


def documents_bound(bounds: Mapping[str, int], width: int) -> int:
    """Return a bound on the documents that a window of `width` tokens can touch.

    Args:
        bounds: of the dataset, from `stream_windows`.
    """
    exact = [w for w in map(int, bounds) if w >= width]
    if exact:
        starts = bounds[str(min(exact))]
    elif bounds:
        widest = max(map(int, bounds))
        starts = -(-width // widest) * bounds[str(widest)]
    else:
        starts = width
    return min(width, starts + 1)
