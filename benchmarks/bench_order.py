"""What does the order cost? Slot tables, the permutation and `Schedule.locate`.

    python benchmarks/bench_order.py

Prints seconds and rows a second, best of the rounds, next to NumPy's own shuffle of as many rows:
the table that the order does without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from olm_data.order.prp import permute, round_keys, unpermute
from olm_data.order.schedule import Schedule, ScheduleStage
from olm_data.order.slots import round_counts, slot_table


def best(rounds: int, work: Callable[[], Any]) -> float:
    """Return the least seconds of `rounds` calls."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def uneven_counts(sources: int, block: int) -> tuple[int, ...]:
    """Return counts that sum to `block`, the largest about 20 times the smallest."""
    weights = [Fraction(1 + 19 * i, sources) for i in range(1, sources + 1)]
    return round_counts([weight / sum(weights) for weight in weights], block)


def main() -> None:
    """Measure and print one line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    for sources, block in ((3, 1 << 16), (1000, 1 << 16), (1000, 1 << 20)):
        counts = uneven_counts(sources, block)
        seconds = best(args.rounds, lambda counts=counts: slot_table(counts))
        print(f"slot table, {sources:5,} sources, B = {block:9,}: {seconds:7.3f} s")
    n = args.rows
    keys, k = round_keys(1, "web", 0), np.arange(n)
    shuffle = best(args.rounds, lambda: np.random.default_rng(1).permutation(n))
    print(f"numpy permutation of {n:,} rows:      {n / shuffle / 1e6:7.1f} M rows/s")
    for name, function in (("permute", permute), ("unpermute", unpermute)):
        seconds = best(args.rounds, lambda f=function: f(k, n, keys))
        print(f"{name}, one key:                     {n / seconds / 1e6:7.1f} M rows/s")
    each = np.broadcast_to(keys, (n, 6)).copy()
    seconds = best(args.rounds, lambda: permute(k, np.full(n, n), each))
    print(f"permute, n and keys for each row:     {n / seconds / 1e6:7.1f} M rows/s")
    counts = uneven_counts(1000, 1 << 16)
    names = [(f"source-{i}", 10**7 + i) for i in range(len(counts))]
    schedule = Schedule(1, names, [ScheduleStage(10**9, counts)])
    for rows in (64, 8192, 100_000):
        wanted = np.arange(rows) + 12345
        schedule.locate(wanted)
        seconds = best(args.rounds, lambda wanted=wanted: schedule.locate(wanted))
        print(
            f"locate {rows:7,} rows, 1,000 sources: {seconds * 1e3:9.3f} ms"
            f"  {rows / seconds / 1e6:6.2f} M rows/s"
        )


if __name__ == "__main__":
    main()
