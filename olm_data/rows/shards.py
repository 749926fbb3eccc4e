"""The shards of several datasets as one row of tokens: which holds a token, opened on demand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from olm_data.dataset.dataset import Dataset, open_shards_budget
from olm_data.dataset.shard import Shard
from olm_data.packing.row_plan import RowPlan
from olm_data.rows.fields import Int64
from olm_data.rows.remote_shards import CachedShard, RemoteShards
from olm_data.rows.shard_cache import ShardCache


class Shards:
    """All shards of several datasets in one row, so that one binary search finds a token's shard.

    Args:
        datasets: the datasets; their shards are kept open here, least recently used out first.
        plans: the row plan of each dataset, None where rows are windows of its stream.
        cache: where shards of remote datasets go; None: they are read by ranges.

    Attributes:
        datasets, plans: as given.
        planned: bool [datasets], whether there is a plan.
        first_token: int64 [datasets], tokens of the datasets before.
        ends: int64 [shards of all datasets], cumulative tokens.
        dtype: the widest of the datasets' dtypes.
        at_hand: shards a `Windows` may hold besides.
        remote: what fetches remote shards, None without a cache.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        plans: Sequence[RowPlan | None],
        cache: ShardCache | None = None,
    ) -> None:
        self.datasets, self.plans = datasets, plans
        self.planned = np.array([plan is not None for plan in plans])
        self.first_token = _before([dataset.tokens for dataset in datasets])
        self._first_shard = _before([len(dataset.token_ends) for dataset in datasets])
        parts = [
            dataset.token_ends + first
            for dataset, first in zip(datasets, self.first_token, strict=True)
        ]
        self.ends: Int64 = np.concatenate(parts)
        self.dtype = np.result_type(*{dataset.dtype for dataset in datasets})
        self._budget = open_shards_budget()
        self.at_hand = min(64, self._budget)
        self._kept: OrderedDict[int, Shard | CachedShard] = OrderedDict()
        self._in_cache = np.array([d.store.remote and cache is not None for d in datasets])
        self.remote = None if cache is None else RemoteShards(datasets, cache)

    def touched(self, source: Int64, row: Int64, start: Int64, length: int) -> tuple[Int64, Int64]:
        """Return which shards of the cache some rows need.

        Args:
            source, row: integers [m], the source of each row and its number there.
            start: int64 [m], its first token where the source has no row plan.
            length: S.

        Returns:
            int64 [k] which of the m rows, and int64 [k] a shard it needs.
        """
        parts = []
        for number in np.flatnonzero(self._in_cache).tolist():
            which, plan = np.flatnonzero(source == number), self.plans[number]
            if plan is None:
                first = start[which]
                last = np.minimum(first + length, self.datasets[number].tokens - 1)
            else:
                high = plan.ends[row[which]].astype(np.int64)
                low = np.where(row[which], plan.ends[row[which] - 1].astype(np.int64), 0)
                owner, piece = _expand(low, high - low)
                which, first = which[owner], plan.starts[piece].astype(np.int64)
                last = first + plan.lengths[piece] - 1
            shards = np.searchsorted(self.ends, self.first_token[number] + first, side="right")
            stop = np.searchsorted(self.ends, self.first_token[number] + last, side="right") + 1
            owner, shard = _expand(shards, stop - shards)
            parts.append((which[owner], shard))
        if not parts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def open(self, number: int) -> Shard | CachedShard:
        """Return a shard by its number over all datasets."""
        shard = self._kept.get(number)
        if shard is not None:
            self._kept.move_to_end(number)
            return shard
        source = int(np.searchsorted(self._first_shard, number, side="right")) - 1
        if self.remote is not None and self._in_cache[source]:
            shard = self.remote.open(number)
        else:
            shard = self.datasets[source].open_shard(number - int(self._first_shard[source]))
        self._kept[number] = shard
        if len(self._kept) > self._budget:
            self._kept.popitem(last=False)
        return shard


def _before(counts: Sequence[int]) -> Int64:
    """Return the exclusive running sums of `counts`."""
    return np.cumsum([0, *counts[:-1]], dtype=np.int64)


def _expand(low: Int64, count: Int64) -> tuple[Int64, Int64]:
    """Return for the ranges [low, low + count) which range each number is of, and the numbers."""
    owner = np.repeat(np.arange(len(low)), count)
    return owner, np.arange(len(owner)) - (np.cumsum(count) - count - low)[owner]
