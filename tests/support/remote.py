"""A mixture over datasets on the S3 server, and the same one over local copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from support.small_datasets import random_shards, write_dataset
from support.store_proxy import Proxy

from olm_data.mixture.mix import mix
from olm_data.rows.cache_plan import CacheOptions
from olm_train.data import DataLoader

S = 16
SHARDS, TOKENS = 12, 1000
"""Shards of the dataset, and tokens of each."""


def remote_mixture(folder: Path, url: str, seed: int = 0, **keys: Any) -> tuple[Path, Path]:
    """Write one dataset to `url` and to `folder`/a; return the locks over the two.

    By default in windowed order, two chunks of a shard at a time.
    """
    shards = random_shards(seed, [[50] * (TOKENS // 50)] * SHARDS)
    locks = []
    for name, data in (("remote", url), ("local", str(folder / "a"))):
        write_dataset(data, shards)
        manifest = {
            "version": 1,
            "seed": 1,
            "sequence_length": S,
            "sources": {"a": {"data": data}},
            "stages": [{"name": "main", "tokens": 2 * SHARDS * TOKENS, "weights": {"a": 1}}],
        } | (keys or {"order": "windowed", "window_chunks": 2})
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(manifest))
        locks.append(Path(mix(str(path), overwrite=True).path))
    return locks[0], locks[1]


SHARD = 128 + 2 * TOKENS + 128 + 8 * (TOKENS // 50)


def loader(lock: Path, folder: Path, size: int | None = None, **options: object) -> DataLoader:
    return DataLoader(
        lock,
        global_batch_size=8 * S,
        rank_microbatch_size=4 * S,
        cache=CacheOptions(folder=str(folder), size=size),
        **options,
    )


def gets(proxy: Proxy) -> list[str]:
    return [seen.path for seen in proxy.seen if seen.method == "GET"]
