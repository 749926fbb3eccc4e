"""Tokens a second of rows: encoded on the fly, and read from shards of the same text.

usage: bench_text_stream.py TEXT_FOLDER TOKENIZER [--sequence-length 1024] [--rows 8] [--repeats 3]

One process and no workers, micro-batches of `rows` rows. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import olm_data
from olm_train import DataLoader, LocalTextDataset

MANIFEST = """version: 1
seed: 1
sequence_length: {length}
sources:
  text: {{data: {data}, max_epochs: 1}}
stages:
  - {{name: main, epochs: {{text: 1}}}}
"""


def timed(make: Callable[[], Iterable[Any]], tokens: Callable[[Any], int]) -> tuple[float, float]:
    """Return seconds to the first batch, and tokens a second of the rest."""
    begun = time.perf_counter()
    items = iter(make())
    next(items)
    first = time.perf_counter()
    count = sum(tokens(item) for item in items)
    return first - begun, count / (time.perf_counter() - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("tokenizer")
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    length, rows = given.sequence_length, given.rows
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "tokens"
        begun = time.perf_counter()
        olm_data.tokenize(given.text, tokenizer=given.tokenizer, output=data, workers=1)
        made = time.perf_counter() - begun
        manifest = Path(folder) / "mix.yaml"
        manifest.write_text(MANIFEST.format(length=length, data=data))
        lock = olm_data.mix(manifest)

        def stream(encoder: str) -> Callable[[], Iterable[Any]]:
            def make() -> Iterable[Any]:
                dataset = LocalTextDataset(
                    given.text, given.tokenizer, context_length=length, encoder=encoder
                )
                return torch.utils.data.DataLoader(dataset, batch_size=rows)

            return make

        def shards() -> Iterable[Any]:
            return DataLoader(
                lock, global_batch_size=rows * length, rank_microbatch_size=rows * length
            )

        cases: dict[str, tuple[Callable[[], Iterable[Any]], Callable[[Any], int]]] = {
            "hf": (stream("hf"), lambda batch: batch.input_ids.numel()),
            "gigatoken": (stream("gigatoken"), lambda batch: batch.input_ids.numel()),
            "shards": (shards, lambda step: sum(batch.input_ids.numel() for batch in step)),
        }
        found = {name: [timed(*case) for _ in range(given.repeats)] for name, case in cases.items()}
    print(
        json.dumps(
            {
                "tokens": lock.total_rows * length,
                "tokenize_s": round(made, 2),
                **{
                    name: {
                        "first_s": round(statistics.median(first for first, _ in runs), 3),
                        "tokens_s": round(statistics.median(rate for _, rate in runs)),
                    }
                    for name, runs in found.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main()
