"""What does it cost to give a sharded model its initial weights?

    python benchmarks/bench_init.py
    python benchmarks/bench_init.py --preset olmo2-7b --ranks 8 --threads 1

Draws the part of one rank of so many, in memory that it uses again and again, and prints CPU
seconds (they hold on a loaded machine, wall time does not) next to torch's own generator.
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from olm_train.model.config import DecoderConfig
from olm_train.model.init import PIECE, Workspace
from olm_train.model.presets import preset_fields

VOCABULARY = 100_278


def draw(values: int, target: np.ndarray, start: int) -> float:
    """Draw `values` values into `target`, over and over; return the CPU seconds of this thread."""
    workspace, begin = Workspace(), time.thread_time()
    for first in range(start, start + values, target.size):
        count = min(target.size, start + values - first)
        workspace.fill(target[:count], 7, first, 0.02)
    return time.thread_time() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="olmo2-7b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--values", type=int, default=1 << 28, help="drawn at most, the rest counted"
    )
    args = parser.parse_args()
    model = DecoderConfig(**{"vocab_size": VOCABULARY, **preset_fields(args.preset)})
    share = math.ceil(model.num_params / args.ranks)
    values = min(share, args.values)
    print(
        f"{args.preset}: {model.num_params:,} parameters, {share:,} on each of {args.ranks} ranks"
    )
    torch.set_num_threads(1)
    whole, begin = torch.empty(1 << 24), time.thread_time()
    whole.normal_(std=0.02)
    rate = whole.numel() / (time.thread_time() - begin)
    print(f"torch's normal_, one generator:    {rate / 1e6:7.1f} M values a CPU second")
    for threads in args.threads:
        targets = [np.zeros(PIECE, dtype=np.float32) for _ in range(threads)]
        each, begin = values // threads, time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            seconds = list(pool.map(draw, [each] * threads, targets, range(0, values, each)))
        wall, spent = time.perf_counter() - begin, sum(seconds)
        done = each * threads
        print(
            f"{threads} thread{'s' if threads > 1 else ''}: {done / spent / 1e6:.1f} M values a CPU"
            f" second, {done / wall / 1e6:.1f} M a second of the clock; a rank's share: "
            f"{share * spent / done:.2f} CPU s"
        )


if __name__ == "__main__":
    main()
