"""Ours: the whole `olm-data tokenize` command, with `--encoder hf` and with `gigatoken`.

Start-up, the parity gate, digests, ends, provenance, accounting and fsync are all included.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from peers.token_writers.base import Part, Peer, Task


def read(output: Path, task: Task) -> Iterator[Part]:
    """Yield one part a shard, in manifest order."""
    from olm_data.dataset.dataset import Dataset

    dataset = Dataset.open(str(output))
    for index in range(len(dataset.manifest.shards)):
        shard = dataset.open_shard(index)
        yield shard.tokens, np.asarray(shard.ends).astype(np.int64)


def ours(encoder: str) -> Peer:
    """Return ours with one encoder."""

    def command(python: Path, task: Task, path: Path) -> list[str]:
        return [
            *(str(python), "-m", "olm_data.cli", "tokenize", *task.inputs),
            *("--tokenizer", task.tokenizer, "--output", task.output),
            *("--encoder", encoder, "--workers", str(task.workers)),
        ]

    return Peer(
        name=f"olm-{encoder}",
        package="olm-data",
        formats=("jsonl.zst", "jsonl", "parquet"),
        command=command,
        read=read,
        lacks="nothing left out: digests, ends, ids, origins, accounts, fsync",
    )


PEERS = [ours("hf"), ours("gigatoken")]
