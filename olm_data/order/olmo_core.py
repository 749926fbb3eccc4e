"""Order `olmo-core`: rows in the order of OLMo-core's fixed-sequence-length data loader. Pure.

    epoch e (from 1): PCG64(seed + e) shuffles uint32 chunks; a batch that is not full is left out

So that a run that began there goes on here. It is a table of 4 bytes a row and epoch, made when the
epoch is first touched, as the shuffle is one pass over all of them. Source: `data_loader.py` of
allenai/OLMo-core 3.0. The rows themselves are made by `instances.py`. The specification is in
docs/reference/mixture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import Size

MOST_ROWS = (1 << 32) - 2
"""OLMo-core counts instances in 32 bits, and so does this order."""


class OlmoCore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the order depends on beside the seed.

    Attributes:
        batch_rows: rows of OLMo-core's global batch; an epoch has whole batches only.
        chunk_rows: neighbouring rows that stay together: its max_target_sequence_length divided
            by the sequence length.
    """

    batch_rows: Size
    chunk_rows: Size

    def epoch_rows(self, rows: int) -> int:
        """Return how many of a source's rows an epoch has."""
        return rows // self.batch_rows * self.batch_rows

    def fits(self, rows: Sequence[int], seed: int) -> bool:
        """Whether this can be the order of sources with so many rows each."""
        return (
            len(rows) == 1
            and rows[0] <= MOST_ROWS
            and self.chunk_rows >= 1
            and 1 <= self.batch_rows <= rows[0]
            and rows[0] % self.chunk_rows == 0
            and seed >= 0
        )


def shuffled(seed: int, epoch: int, rows: int, chunk_rows: int) -> NDArray[np.uint32]:
    """Return the rows of an epoch, in order.

    Args:
        epoch: from 0; OLMo-core's first one is 1.
        rows: a multiple of `chunk_rows`.

    Returns:
        read-only uint32 [rows].
    """
    return _tables(seed, epoch, rows, chunk_rows)


def places(seed: int, epoch: int, rows: int, chunk_rows: int) -> NDArray[np.uint32]:
    """Return where each row stands in an epoch: the inverse of `shuffled`."""
    order = shuffled(seed, epoch, rows, chunk_rows)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(rows, dtype=np.uint32)
    return inverse


@lru_cache(maxsize=2)
def _tables(seed: int, epoch: int, rows: int, chunk_rows: int) -> NDArray[np.uint32]:
    chunks = np.arange(rows // chunk_rows, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed + epoch + 1)).shuffle(chunks)
    inside = np.arange(chunk_rows, dtype=np.uint32)
    order = (chunks[:, None] * np.uint32(chunk_rows) + inside).reshape(-1)
    order.flags.writeable = False
    return order
