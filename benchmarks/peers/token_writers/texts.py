"""The texts of one input file, for peers that leave the reading to their users."""

from __future__ import annotations

import json
from collections.abc import Iterator


def texts(path: str) -> Iterator[str]:
    """Yield the texts of a .jsonl, .jsonl.zst or .parquet file."""
    if path.endswith(".parquet"):
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches(columns=["text"]):
            yield from batch.column("text").to_pylist()
    elif path.endswith(".zst"):
        import zstandard

        with zstandard.open(path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line)["text"] for line in file)
    else:
        with open(path, encoding="utf-8") as file:
            yield from (json.loads(line)["text"] for line in file)
