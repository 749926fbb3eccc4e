"""A mixture over datasets on the S3 server, and the same one over local copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from support.datasets import random_shards, write_dataset

from olm_data.mixture.mix import mix

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
