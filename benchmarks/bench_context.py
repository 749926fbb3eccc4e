"""How even is attention over the ranks that share a micro-batch, which keys do they need of others,
and how long does dealing take?

    python benchmarks/bench_context.py tokens/web tokens/code
    python benchmarks/bench_context.py tokens/web --length 65536 --degrees 2,8 --batches 50

Documents of data sets, one after another as they stand there, are cut into micro-batches of one
row. By how much do the query-key pairs of the busiest rank lie above the mean: dealt by
`olm_train/data/dealing.py`; by two chunks, one from each end (head-tail, zig-zag); in equal parts.
And MB that a rank gets in the forward pass of a layer of 32 and 8 heads of 128 in bf16, by
`cp_config.exchange`, mean over the ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_train.data.dealing import deal, imbalance, lacking, pairs_of_chunks

HEADS, KEYS, SIZE = 32, 2 * 8, 128 * 2
"""Heads of queries, those of keys and values, bytes of one."""


def micro_batches(ends: np.ndarray, size: int, most: int) -> Iterator[np.ndarray]:
    """Offsets of the pieces of documents in each micro-batch of `size` tokens."""
    for first in range(0, min(int(ends[-1]) // size, most) * size, size):
        inside = ends[(ends > first) & (ends < first + size)] - first
        yield np.array([0, *inside, size], np.int32)


def head_tail(degree: int) -> np.ndarray:
    """Chunks of each rank: one from each end."""
    return np.array([[rank, 2 * degree - 1 - rank] for rank in range(degree)])


def measure(
    cu_seqlens: np.ndarray, degree: int, window: int | None
) -> tuple[float, float, float, float, float, float]:
    """Imbalance of the three ways, chunks of a rank, seconds of dealing, keys that are needed."""
    size = int(cu_seqlens[-1])
    begun = time.perf_counter()
    dealt = deal(cu_seqlens, degree, (window,))
    seconds = time.perf_counter() - begun
    ways = [dealt, head_tail(degree), np.arange(degree)[:, None]]
    pairs = [pairs_of_chunks(cu_seqlens, size // way.size, (window,)) for way in ways]
    found = [imbalance(each, way) for each, way in zip(pairs, ways, strict=True)]
    of_ranks = [lacking(cu_seqlens, dealt, rank, window) for rank in range(degree)]
    needed = sum(len(each) for others in of_ranks for each in others) / degree
    return found[0], found[1], found[2], float(dealt.shape[1]), seconds, needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("datasets", nargs="+")
    parser.add_argument("--length", type=int, default=32_768, help="tokens of a row")
    parser.add_argument("--window", type=int, help="of the layers; default: none")
    parser.add_argument("--degrees", default="2,4,8")
    parser.add_argument("--batches", type=int, default=100, help="at most, of each data set")
    options = parser.parse_args()
    print(
        f"{'data set':24} {'degree':>6} {'batches':>7} | dealt: mean, worst, chunks, ms | "
        "head-tail: mean, worst | equal parts: mean, worst | MB: gather, needed, ulysses"
    )
    for folder in options.datasets:
        dataset = Dataset.open(folder)
        ends = dataset.ends_between(0, dataset.tokens)
        for degree in map(int, options.degrees.split(",")):
            each = [
                measure(offsets, degree, options.window)
                for offsets in micro_batches(ends, options.length, options.batches)
            ]
            if not each:
                continue
            mean, worst = np.mean(each, 0), np.max(each, 0)
            away = (degree - 1) * options.length / degree  # tokens that a rank has not
            keys = [away * KEYS, mean[5] * KEYS, away / degree * (2 * HEADS + KEYS)]
            sizes = " ".join(f"{SIZE * each / 1e6:7.1f}" for each in keys)
            print(
                f"{folder.rstrip('/').rpartition('/')[2]:24} {degree:6} {len(each):7} | "
                f"{mean[0]:6.1%} {worst[0]:6.1%} {mean[3]:5.1f} {1e3 * mean[4]:6.1f} | "
                f"{mean[1]:6.1%} {worst[1]:6.1%} | {mean[2]:6.1%} {worst[2]:6.1%} | {sizes}"
            )


if __name__ == "__main__":
    main()
