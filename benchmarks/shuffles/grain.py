"""Runs in grain's environment: `python -m shuffles.grain WISH` writes orders as an .npy file.

WISH is JSON: n, seeds, count, output. Four rounds, as `MapDataset.shuffle` asks for.
"""

from __future__ import annotations

import json
import sys

import numpy as np

ROUNDS = 4


def main() -> None:
    """Ask for one row at a time: there is no call for several."""
    from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

    wish = json.loads(sys.argv[1])
    shuffle, last, count = index_shuffle_module.index_shuffle, wish["n"] - 1, wish["count"]
    orders = [[shuffle(i, last, seed, ROUNDS) for i in range(count)] for seed in wish["seeds"]]
    np.save(wish["output"], np.array(orders, np.int64))


if __name__ == "__main__":
    main()
