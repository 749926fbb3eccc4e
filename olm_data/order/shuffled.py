"""Order `global`: any row of a source may stand anywhere in an epoch, by a keyed permutation. Pure.

    row = permute(position; n = rows of the source, keys = round_keys(seed, name, epoch))

No table of the dataset's size: six keys an epoch. docs/reference/mixture.md is the specification.
"""

from __future__ import annotations

from typing import ClassVar

from olm_data.order.base import Int64, Order, SourceEpochs
from olm_data.order.prp import permute, unpermute


class Shuffled(Order, frozen=True):
    """The default order; the lock records nothing of it."""

    name: ClassVar[str] = "global"

    def rows_at(self, positions: Int64, epochs: SourceEpochs) -> Int64:
        """Return the rows at positions of an epoch."""
        return permute(positions, epochs.rows, epochs.keys())

    def positions_of(self, rows: Int64, epochs: SourceEpochs) -> Int64:
        """Return where rows stand in an epoch."""
        return unpermute(rows, epochs.rows, epochs.keys())
