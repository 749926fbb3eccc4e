"""How near is `olm-data verify` to the speed of hashing the same files?

    python benchmarks/bench_verify.py                    # 512 MB of tokens in 8 shards
    python benchmarks/bench_verify.py --megabytes 4096 --shards 64

In one process, on the same files, with a thread for each CPU granted, rounds taken in turn,
the best of each:

* `sha256`: hashlib over every file of the dataset, one file a thread at a time: the bound;
* `verify`: sha256, checksums of blocks, ids, EOS, ends, document rows, manifest, round trip;
* `sample`: `verify --sample 1%`, seconds only.

Prints MB/s and the ratio verify / sha256.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

DOCUMENT_TOKENS = 600


def make(folder: Path, megabytes: int, shards: int) -> None:
    """Write a dataset of random ids, uint16, with an EOS after each document."""
    from support.small_datasets import write_dataset

    rng, each = np.random.default_rng(1), megabytes * 500_000 // shards // DOCUMENT_TOKENS
    documents = []
    for _ in range(shards):
        ids = rng.integers(1, 50_000, (each, DOCUMENT_TOKENS), dtype=np.uint32)
        ids[:, -1] = 0
        documents.append(list(ids))
    write_dataset(folder, documents, eos=0)


def hash_all(folder: Path, threads: int) -> None:
    """Hash every file of the dataset."""

    def one(path: Path) -> None:
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, sorted(folder.iterdir())))


def best(rounds: int, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least seconds of each work over rounds taken in turn."""
    seconds = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def main() -> None:
    """Parse, measure, print."""
    from olm_data.extensions.verify import datasets as verb
    from olm_data.runners.local import granted_cpus

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "dataset"
        make(folder, asked.megabytes, asked.shards)
        size = sum(path.stat().st_size for path in folder.iterdir())
        # the rows are made up: there is no plan and no tokenizer, which costs no time
        seconds = best(
            asked.rounds,
            {
                "sha256": lambda: hash_all(folder, granted_cpus()),
                "verify": lambda: verb.verify(str(folder)),
                "sample": lambda: verb.verify(str(folder), sample=Fraction(1, 100)),
            },
        )
    print(f"{size / 1e6:,.0f} MB in {asked.shards} shards, {granted_cpus()} threads")
    for work in ("sha256", "verify"):
        print(f"{work} {seconds[work]:7.2f} s  {size / seconds[work] / 1e6:8,.0f} MB/s")
    print(f"sample {seconds['sample']:7.3f} s")
    print(f"verify / sha256 = {seconds['sha256'] / seconds['verify']:.2f}")


if __name__ == "__main__":
    main()
