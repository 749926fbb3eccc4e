"""Are the shuffles random enough, and permutations at all? Ours, NumPy's and two public keyed ones.

    python benchmarks/shuffle_quality.py                  # about five minutes; installs grain first
    python benchmarks/shuffle_quality.py --keys 20 --only 'prp1, seeds;numpy'
    python benchmarks/shuffle_quality.py --sizes 65537

Prints Markdown: which lengths are not permutations, then a table a length. A cell tests one
statistic (see `shuffles.quality`) over all keys: p that the keys' p-values are uniform, and in
parentheses how many keys have a p-value below 0.01; one in a hundred does by chance. `each other`
compares key k with key k + 1. `equal` counts positions that hold the same row for both; expected is
one a pair. Above a million rows only the first 65,536 positions are looked at, and only of shuffles
that need no table of all rows. Exit code 1 where ours fails.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np
from peers.environments import default_root

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from shuffles.orders import Orders, shuffles  # noqa: E402
from shuffles.quality import STATISTICS, against_each_other, uniform_p, values  # noqa: E402

SIZES = (10_007, 65_536, 10**9, 10**12)  # the last is more than any table can hold
WHOLE = 10**6  # longer permutations are looked at in part
WINDOW = 1 << 16
# shuffles that need no table of all rows, and the most rows they are made for
WITHOUT_A_TABLE = {"prp1, seeds": 1 << 62, "prp1, epochs": 1 << 62, "grain": 1 << 32}
LENGTHS = (*range(1, 257), 2**12, 2**12 + 1, 2**16 - 1, 2**16, 2**16 + 1, 2**17, 2**18 + 1)
LEAST = 1e-4  # p below which a shuffle fails: the tables hold some hundred cells


def main() -> int:
    """Test and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=50)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--only", help="names of shuffles, separated by ;")
    parser.add_argument("--peer-envs", type=Path, default=default_root())
    options = parser.parse_args()
    chosen = shuffles(options.peer_envs)
    if options.only:
        chosen = {name: chosen[name] for name in options.only.split(";")}
    failed = print_bijections(chosen)
    for n in options.sizes:
        failed |= print_table(chosen, n, options.keys)
    ours = sorted(name for name in failed if name.startswith("prp1"))
    print("\nfailed: " + (", ".join(sorted(failed)) or "none"))
    return 1 if ours else 0


def print_bijections(chosen: dict[str, Orders]) -> set[str]:
    """Print the lengths at which a shuffle is no permutation; return which shuffles have any."""
    failed = set()
    print(f"{len(LENGTHS)} lengths from 1 to {max(LENGTHS):,}, one key each: not a permutation at")
    for name, orders in chosen.items():
        bad = []
        for n in LENGTHS:
            (order,) = orders(n, [n], n)
            if not np.array_equal(np.sort(order), np.arange(n)):
                bad.append(n)
        print(f"* {name}: {', '.join(f'{n:,}' for n in bad) or 'none'}", flush=True)
        if bad:
            failed.add(name)
    return failed


def print_table(chosen: dict[str, Orders], n: int, keys: int) -> set[str]:
    """Print the table of one length; return the shuffles that fail a statistic."""
    whole = n <= WHOLE
    tests = dict(STATISTICS) if whole else {**STATISTICS, "values": values}
    heads = ["shuffle", *tests, "each other", f"equal, of {keys - 1}", "us a row"]
    count = n if whole else WINDOW
    part = "" if whole else f", the first {count:,} positions"
    print(f"\n{n:,} rows{part}, {keys} keys\n\n| {' | '.join(heads)} |")
    print("| --- " * len(heads) + "|")
    failed = set()
    for name, orders in chosen.items():
        if not whole and n > WITHOUT_A_TABLE.get(name, 0):
            continue
        begun = time.perf_counter()
        found = orders(n, range(keys), count)
        micros = (time.perf_counter() - begun) / (keys * count) * 1e6
        each = {test: [function(order, n) for order in found] for test, function in tests.items()}
        neighbours = list(itertools.pairwise(found))
        each["each other"] = [against_each_other(one, other, n) for one, other in neighbours]
        cells = []
        for ps in each.values():
            p = uniform_p(ps)
            cells.append(
                f"{'**' * (p < LEAST)}{p:.2g}{'**' * (p < LEAST)} ({sum(p < 0.01 for p in ps)})"
            )
            if p < LEAST:
                failed.add(name)
        equal = sum(int((one == other).sum()) for one, other in neighbours)
        print(f"| {name} | {' | '.join(cells)} | {equal} | {micros:.3f} |", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
