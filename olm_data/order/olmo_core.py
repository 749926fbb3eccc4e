"""Order `olmo-core`: rows in the order of OLMo-core's fixed-sequence-length data loader. Pure.

    epoch e (from 1): PCG64(seed + e) shuffles uint32 chunks; a batch that is not full is left out

So that a run that began there goes on here. It is a table of 4 bytes a row and epoch, made when the
epoch is first touched, as the shuffle is one pass over all of them. Source: `data_loader.py` of
allenai/OLMo-core 3.0. The rows are cut by `packing/instances.py`. The specification is in
docs/reference/mixture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.errors import UsageError
from olm_data.order.base import Int64, Order, SourceEpochs, SourceSize

MOST_ROWS = (1 << 32) - 2
"""OLMo-core counts instances in 32 bits, and so does this order."""


class OlmoCore(Order, frozen=True):
    """OLMo-core's order, of one source.

    Attributes:
        batch_rows: rows of OLMo-core's global batch; an epoch has whole batches only.
        chunk_rows: neighbouring rows that stay together: its max_target_sequence_length divided
            by the sequence length.
    """

    name: ClassVar[str] = "olmo-core"

    batch_rows: Annotated[
        int,
        msgspec.Meta(
            ge=1,
            le=MOST_ROWS,
            description="an epoch of OLMo-core ends with its last whole batch",
            examples=["its global_batch_size divided by its sequence_length"],
        ),
    ]
    chunk_rows: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)] = 1

    @classmethod
    def check(cls, packing: str, views: Sequence[bool]) -> None:
        """Refuse all but the rows of one list of token files."""
        refused = None
        if packing != "concat":
            refused = f"packing: {packing}"
        elif len(views) != 1:
            refused = f"{len(views)} sources"
        elif views[0]:
            refused = "a view"
        if refused:
            raise UsageError(
                f"order: olmo-core does not go with {refused}",
                why="it gives the rows of one list of token files in the order of OLMo-core",
                fix="import the files of the run as one source, in the order of its paths",
            )

    def compile(self, sources: Sequence[SourceSize]) -> Order:
        """Return the order, if the source has a batch."""
        if not self.fits([source.rows for source in sources]):
            raise UsageError(
                f"the source has {sources[0].rows:,} rows, not 1 batch of {self.batch_rows:,} to "
                f"{MOST_ROWS:,}",
                fix="write the batch_rows of the run: its global batch in instances",
            )
        return self

    @property
    def shard_rows(self) -> int | None:
        """Rows are cut as `NumpyFSLDataset` does, whole chunks of each token file."""
        return self.chunk_rows

    def rows_at(self, positions: Int64, epochs: SourceEpochs) -> Int64:
        """Return the rows at positions of an epoch, from its table."""
        return self._look_up(shuffled, positions, epochs)

    def positions_of(self, rows: Int64, epochs: SourceEpochs) -> Int64:
        """Return where rows stand in an epoch; those behind the last batch are left out of it."""
        return self._look_up(shuffled_positions, rows, epochs)

    def epoch_rows(self, rows: Int64) -> Int64:
        """Return how many rows an epoch of each source has: whole batches."""
        return rows // self.batch_rows * self.batch_rows

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether there is one source, of whole chunks and at least a batch."""
        return (
            len(rows) == 1
            and rows[0] <= MOST_ROWS
            and self.chunk_rows >= 1
            and 1 <= self.batch_rows <= rows[0]
            and rows[0] % self.chunk_rows == 0
        )

    def _look_up(
        self,
        table: Callable[[int, int, int, int], NDArray[np.uint32]],
        index: Int64,
        epochs: SourceEpochs,
    ) -> Int64:
        found = np.empty(index.shape, dtype=np.int64)
        for epoch in np.unique(epochs.epoch).tolist():
            here = epochs.epoch == epoch
            rows = int(epochs.rows[here][0])
            found[here] = table(epochs.seed, epoch, rows, self.chunk_rows)[index[here]]
        return found


@lru_cache(maxsize=2)
def shuffled(seed: int, epoch: int, rows: int, chunk_rows: int) -> NDArray[np.uint32]:
    """Return the rows of an epoch, in order.

    Args:
        epoch: from 0; OLMo-core's first one is 1.
        rows: a multiple of `chunk_rows`.

    Returns:
        read-only uint32 [rows].
    """
    chunks = np.arange(rows // chunk_rows, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed + epoch + 1)).shuffle(chunks)
    inside = np.arange(chunk_rows, dtype=np.uint32)
    order = (chunks[:, None] * np.uint32(chunk_rows) + inside).reshape(-1)
    order.flags.writeable = False
    return order


def shuffled_positions(seed: int, epoch: int, rows: int, chunk_rows: int) -> NDArray[np.uint32]:
    """Return where each row stands in an epoch: the inverse of `shuffled`."""
    order = shuffled(seed, epoch, rows, chunk_rows)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(rows, dtype=np.uint32)
    return inverse
