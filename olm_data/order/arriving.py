"""Order `arriving`: an epoch of a source goes through groups of its shards, one by one. Pure.

    rows of group 1, permuted | rows of group 2, permuted | ...    group k ends at row bounds[k]

Rows of a group depend on no later one, so a run may begin while later shards are still written.
docs/reference/mixture.md is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import Size
from olm_data.errors import UsageError
from olm_data.order.base import Int64, Order, OrderKeys, SourceEpochs, SourceSize
from olm_data.order.prp import permute, unpermute
from olm_data.order.windowed import window_keys


class ArrivingKeys(OrderKeys, frozen=True):
    """`order: arriving` in a manifest."""

    name: ClassVar[str] = "arriving"

    @classmethod
    def check(cls, packing: str, views: Sequence[bool]) -> None:
        """Refuse rows that depend on documents still to come."""
        if packing != "concat" or any(views):
            raise UsageError(
                "order: arriving goes with packing: concat and whole datasets alone",
                why="another packing, where and exclude_ids look at all documents first",
                fix="leave packing, where and exclude_ids out, or leave order out and run olm-data "
                "mix when the text is tokenised",
            )

    def compile(self, sources: Sequence[SourceSize]) -> Arriving:
        """Return the order of sources of which the first group is there."""
        return Arriving(bounds=tuple((s.rows,) for s in sources), ended=(False,) * len(sources))


class Arriving(Order, frozen=True):
    """How far each source is there, in the order of the lock's sources.

    Attributes:
        bounds: rows up to the end of each group of shards, those of all groups that are there.
        ended: whether no group follows.
    """

    name: ClassVar[str] = "arriving"
    keys: ClassVar[type[OrderKeys] | None] = ArrivingKeys

    bounds: tuple[tuple[Size, ...], ...]
    ended: tuple[bool, ...]

    def rows_at(self, positions: Int64, epochs: SourceEpochs) -> Int64:
        """Return the rows at positions of an epoch.

        Raises:
            UsageError: they are still to arrive.
        """
        if self._unknown(epochs).any():
            raise UsageError(
                "these rows of the run are in no shard yet: their text is still to arrive",
                fix="ask again when it is there: olm-data mix MANIFEST brings the lock up to date",
            )
        return self._within(positions, epochs, permute)

    def positions_of(self, rows: Int64, epochs: SourceEpochs) -> Int64:
        """Return where rows stand in an epoch; in one that is not known, behind its end."""
        found = self._within(rows, epochs, unpermute)
        return np.where(self._unknown(epochs), epochs.rows, found)

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether the groups of each source hold its rows."""
        return len(self.bounds) == len(self.ended) == len(rows) and all(
            ends and ends[-1] == n and all(a <= b for a, b in pairwise(ends))
            for ends, n in zip(self.bounds, rows, strict=True)
        )

    def is_complete(self, source: int) -> bool:
        """Whether no row of a source is still to arrive."""
        return self.ended[source]

    def for_source(self, source: int) -> Arriving:
        """Return how far one source is there."""
        return Arriving(bounds=(self.bounds[source],), ended=(self.ended[source],))

    def join(self, others: Sequence[Arriving]) -> Arriving:
        """Return the order of several sources, each with its groups."""
        every = (self, *others)
        return Arriving(
            bounds=tuple(ends for order in every for ends in order.bounds),
            ended=tuple(ended for order in every for ended in order.ended),
        )

    def _unknown(self, epochs: SourceEpochs) -> NDArray[np.bool_]:
        """Return bool [m], whether an epoch begins behind rows that are still to arrive."""
        unknown: NDArray[np.bool_] = (epochs.epoch > 0) & ~np.array(self.ended)[epochs.source]
        return unknown

    def _within(self, x: Int64, epochs: SourceEpochs, permuted: Any) -> Int64:
        """Permute rows int64 [m] or their positions, each within its group."""
        x = np.asarray(x, dtype=np.int64)
        if ((x < 0) | (x >= epochs.rows)).any():
            raise IndexError("a position is outside its permutation")
        first, size, group = np.empty_like(x), np.empty_like(x), np.empty_like(x)
        for source in np.unique(epochs.source).tolist():
            here, ends = epochs.source == source, np.array(self.bounds[source], np.int64)
            group[here] = np.searchsorted(ends, x[here], side="right")
            first[here] = np.append(0, ends)[group[here]]
            size[here] = ends[group[here]] - first[here]
        result: Int64 = first + permuted(x - first, size, window_keys(epochs.keys(), group))
        return result
