"""Runs in grain's environment: writes orders as .npy files, "done" after each.

A wish is a line of JSON: n, seeds, count, output. Four rounds, as `MapDataset.shuffle` asks for.
"""

from __future__ import annotations

import json
import sys

import numpy as np

ROUNDS = 4


def main() -> None:
    """Ask for one row at a time: there is no call for several."""
    from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

    shuffle = index_shuffle_module.index_shuffle
    for line in sys.stdin:
        wish = json.loads(line)
        last, count = wish["n"] - 1, wish["count"]
        orders = [[shuffle(i, last, seed, ROUNDS) for i in range(count)] for seed in wish["seeds"]]
        np.save(wish["output"], np.array(orders, np.int64))
        print("done", flush=True)


if __name__ == "__main__":
    main()
