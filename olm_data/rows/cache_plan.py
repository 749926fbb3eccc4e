"""How large the shard cache of a mixture has to be, and the cache itself.

lock, datasets -> bytes that a run needs at a time -> refused with the numbers, or a ShardCache
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ResourceError, UsageError
from olm_data.mixture.lock import Lock
from olm_data.rows.remote_shards import remote_shard
from olm_data.rows.shard_cache import ShardCache, free_bytes

DEFAULT_FOLDER = "~/.cache/olm/shards"


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Where shards of remote datasets go.

    Attributes:
        folder: local folder, shared by all ranks and runs of this machine.
        size: bytes it may hold; None: twice what the mixture needs at a time, or all of it.
        ranks: ranks of this machine, which share it.
    """

    folder: str = DEFAULT_FOLDER
    size: int | None = None
    ranks: int = 1


@dataclass(frozen=True)
class CacheNeed:
    """Bytes of the remote shards of a mixture: at a time, at least; and all of them."""

    least: int
    total: int


def cache_need(lock: Lock, datasets: Sequence[Dataset], ranks: int = 1) -> CacheNeed:
    """Return what the remote sources of a lock need; zeros where none is remote.

    Of a source with a row plan, any step may need any shard; of others the order says how much. A
    shard is added for each rank that goes on to the next.
    """
    least = total = largest = 0
    for number, dataset in enumerate(datasets):
        drawn = any(stage.rows_by_source[number] for stage in lock.stages)
        if not dataset.store.remote or not drawn:
            continue
        sizes = np.array(
            [remote_shard(dataset, i).size for i in range(len(dataset.manifest.shards))], np.int64
        )
        total += int(sizes.sum())
        largest = max(largest, int(sizes.max()))
        least += (
            lock.order.cache_bytes(number, lock.sequence_length, dataset.token_ends, sizes)
            if lock.sources[number].plan is None
            else int(sizes.sum())
        )
    return CacheNeed(min(total, least + ranks * largest), total)


def open_cache(lock: Lock, datasets: Sequence[Dataset], options: CacheOptions) -> ShardCache | None:
    """Open the cache for a mixture; None where no source is remote.

    Raises:
        UsageError: the size is smaller than what is needed at a time.
        ResourceError: the disk has less room than that.
    """
    need = cache_need(lock, datasets, options.ranks)
    if not need.total:
        return None
    size = min(need.total, 2 * need.least) if options.size is None else options.size
    folder = Path(options.folder).expanduser()
    windowed = "" if lock.order.partial_cache else "write order: windowed in the manifest; or "
    if size < need.least:
        raise UsageError(
            f"the shard cache may hold {size:,} bytes; this mixture needs {need.least:,} at a "
            f"time ({need.total:,} in all)",
            where="data_loader.cache.size_gb",
            why="shards would be fetched again and again",
            fix=f"set data_loader.cache.size_gb to {_up(2 * need.least)} (at least "
            f"{_up(need.least)}); {windowed}set data_loader.cache.enabled=false to read "
            "row by row",
        )
    free = free_bytes(folder)
    if free < min(size, need.total):
        raise ResourceError(
            f"the shard cache would hold up to {min(size, need.total):,} bytes; {free:,} are free "
            f"for it, and this mixture needs {need.least:,} at a time",
            where=str(folder),
            fix=f"choose another data_loader.cache.folder; {windowed}set data_loader.cache.size_gb",
        )
    return ShardCache(folder, size)


def _up(size: int) -> str:
    """Return bytes in GB, rounded up to three decimals."""
    return f"{-(-size // 10**6) / 1000:g}"
