"""Documents of random ids, with lengths as text has them."""

from __future__ import annotations

import numpy as np


def documents(rng: np.random.Generator, tokens: int, mean: int) -> list[np.ndarray]:
    """Return documents of log-normal length, `tokens` in all."""
    lengths = np.maximum(1, rng.lognormal(np.log(mean) - 0.5, 1.0, 2 * tokens // mean + 2))
    ends = np.cumsum(lengths.astype(np.int64))
    ids = rng.integers(0, 50_000, tokens, dtype=np.uint32)
    return np.split(ids, ends[ends < tokens])
