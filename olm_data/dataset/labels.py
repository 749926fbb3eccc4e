"""Which tokens of a shard are trained: ends of alternating runs, [not trained, trained, ...].

    mask of documents --changes--> positions --+ token count--> labels (shard-00000.labels.npy)
    labels --trained--> mask of any range of tokens

The first run is not trained and ends at 0 where the first token is; all others are not empty. A
shard without labels is trained whole. Specified in docs/reference/format.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bool = NDArray[np.bool_]


def changes(mask: Bool, before: bool) -> NDArray[np.int64]:
    """Return where in bool [n] it is another than just before, `before` the first."""
    return np.flatnonzero(np.diff(mask, prepend=before))


def trained(labels: np.ndarray, start: int, stop: int) -> Bool:
    """Return bool [stop - start], which tokens of a range are in a trained run.

    Args:
        labels: uint64 [runs] of a shard.
        start, stop: 0 <= start <= stop <= its tokens.
    """
    ends = labels.view(np.int64)
    low, high = ends.searchsorted(start, side="right"), ends.searchsorted(stop, side="left")
    edges = np.concatenate(([start], ends[low:high], [stop]))
    mask: Bool = (np.arange(low, high + 1) % 2 == 1).repeat(np.diff(edges))
    return mask


def trained_at(labels: np.ndarray, tokens: NDArray[np.int64]) -> Bool:
    """Return bool [n], which of some tokens, int64 [n], are in a trained run."""
    found: Bool = labels.view(np.int64).searchsorted(tokens, side="right") % 2 == 1
    return found


def trained_tokens(labels: np.ndarray) -> int:
    """Return how many tokens are in trained runs."""
    return int(np.diff(labels.astype(np.int64), prepend=0)[1::2].sum())
