"""The `cache` section of `data_loader`: whole shards of remote datasets on a local disk.

Never: the cache itself, which is `olm_data.rows.shard_cache`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from olm_data.config.convert import Config
from olm_data.config.hints import FilePath
from olm_data.errors import UsageError
from olm_data.rows.cache_plan import DEFAULT_FOLDER, CacheOptions

_CACHE_FOLDER = FilePath(os.path.expanduser(DEFAULT_FOLDER))


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Config):
    """The local copy of shards of remote datasets; local datasets are read where they are.

    Attributes:
        enabled: copy whole shards of remote datasets to a local folder; false: their rows are read
            one by one, a request each.
        folder: local folder, shared by all ranks and runs of a machine.
        size_gb: 10^9 bytes it may hold; default: twice what the mixture needs at a time. One that
            is too small is refused with the numbers.
    """

    enabled: bool = True
    folder: FilePath = _CACHE_FOLDER
    size_gb: Annotated[float, Meta(gt=0, lt=1e9)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "://" in self.folder:
            raise UsageError(
                f"the cache folder {self.folder} is remote",
                where="data_loader.cache.folder",
                fix="give a folder on a local disk",
            )

    def build(self) -> CacheOptions | None:
        """Return the options of the cache, None if there is to be none."""
        if not self.enabled:
            return None
        size = None if self.size_gb is None else round(self.size_gb * 10**9)
        return CacheOptions(folder=self.folder, size=size)
