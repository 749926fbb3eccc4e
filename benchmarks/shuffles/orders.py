"""Shuffles by one signature: (n, seed, count) -> the rows at positions 0 .. count - 1, int64.

prp1            ours
windowed        ours with `order: windowed`: 64 chunks, 16 of them a window; a compromise
numpy           `Generator.permutation`: Fisher and Yates, a table of all rows
grain           `index_shuffle`, the cipher behind `MapDataset.shuffle`, from its own environment
swap-or-not     V. Hoang, B. Morris, P. Rogaway, "An Enciphering Scheme Based on a Card Shuffle",
                2012, with 90 rounds of SHA-256 as the Ethereum consensus specification fixes it
affine          a control that must fail: a * i + b mod n, a linear congruential generator
buffer          what streaming readers do: a buffer of 1,000 rows, one at random leaves at a time

Never: judge an order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers.environments import python_of

from olm_data.order.prp import permute, round_keys
from olm_data.order.windowed import permute_windowed

BUFFER = 1000
CHUNKS, WINDOW_CHUNKS = 64, 16
ROUNDS = 90  # of swap-or-not


def prp1(n: int, seed: int, count: int) -> np.ndarray:
    """The order of the project; `seed` stands for the seed of a mixture."""
    return permute(np.arange(count), n, round_keys(seed, "web", 0))


def prp1_epochs(n: int, seed: int, count: int) -> np.ndarray:
    """The same, with `seed` as the epoch."""
    return permute(np.arange(count), n, round_keys(0, "web", seed))


def windowed(n: int, seed: int, count: int) -> np.ndarray:
    """The order of the project for remote sources: chunks, then rows inside a few chunks."""
    keys = round_keys(seed, "web", 0)
    return permute_windowed(np.arange(count), n, max(1, n // CHUNKS), WINDOW_CHUNKS, keys)


def numpy_permutation(n: int, seed: int, count: int) -> np.ndarray:
    """The first rows of a whole table."""
    return np.random.default_rng(seed).permutation(n)[:count]


def swap_or_not(n: int, seed: int, count: int) -> np.ndarray:
    """Ninety rounds, each of which swaps a position with its mirror or not, by one hashed bit."""
    key = hashlib.sha256(b"%d" % seed).digest()
    place = np.arange(count, dtype=np.int64)
    for turn in range(ROUNDS):
        begin = key + bytes([turn])
        pivot = int.from_bytes(hashlib.sha256(begin).digest()[:8], "little") % n
        mirror = (pivot + n - place) % n
        higher = np.maximum(place, mirror)
        blocks, which = np.unique(higher // 256, return_inverse=True)
        hashes = b"".join(
            hashlib.sha256(begin + block.to_bytes(4, "little")).digest()
            for block in blocks.tolist()
        )
        bits = np.frombuffer(hashes, np.uint8).reshape(-1, 32)
        bit = bits[which, higher % 256 // 8] >> (higher % 8).astype(np.uint8) & 1
        place = np.where(bit == 1, mirror, place)
    return place


def affine(n: int, seed: int, count: int) -> np.ndarray:
    """A line, wrapped around."""
    rng = np.random.default_rng(seed)
    factor = 0
    while math.gcd(factor, n) != 1:
        factor = int(rng.integers(1, n))
    start = int(rng.integers(n))
    return np.array([(factor * i + start) % n for i in range(count)], np.int64)


def buffer(n: int, seed: int, count: int) -> np.ndarray:
    """Rows in order through a buffer that lets a random one out for each that comes in."""
    rng = np.random.default_rng(seed)
    held, out = list(range(min(BUFFER, n))), []
    for row in range(len(held), n):
        at = int(rng.integers(len(held)))
        out.append(held[at])
        held[at] = row
    return np.array(out + rng.permutation(held).tolist(), np.int64)[:count]


@dataclass
class Grain:
    """grain in its environment (see `environments.Installed`), as one process that is asked."""

    root: Path
    package: str = "grain"
    environment: str = "loader-grain"
    installs: tuple[tuple[str, ...], ...] = (("grain", "numpy"),)
    process: subprocess.Popen[str] | None = None

    def orders(self, n: int, seeds: Sequence[int], count: int) -> list[np.ndarray]:
        """Return one order a seed."""
        if self.process is None:  # it ends with its standard input, and so with this program
            self.process = subprocess.Popen(
                [str(python_of(self, self.root)), "-m", "shuffles.grain"],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="olm-shuffle-") as folder:
            wish = {"n": n, "seeds": list(seeds), "count": count, "output": f"{folder}/orders.npy"}
            print(json.dumps(wish), file=self.process.stdin, flush=True)
            if self.process.stdout.readline() != "done\n":
                raise RuntimeError("the program of grain ended; its words are above")
            return list(np.load(wish["output"], allow_pickle=False))


Orders = Callable[[int, Sequence[int], int], list[np.ndarray]]


def one_by_one(order: Callable[[int, int, int], np.ndarray]) -> Orders:
    """Make a shuffle of one seed one of several."""
    return lambda n, seeds, count: [order(n, seed, count) for seed in seeds]


def shuffles(root: Path) -> dict[str, Orders]:
    """All shuffles by name; `root` holds the environments of other projects."""
    return {
        "prp1, seeds": one_by_one(prp1),
        "prp1, epochs": one_by_one(prp1_epochs),
        "windowed": one_by_one(windowed),
        "numpy": one_by_one(numpy_permutation),
        "grain": Grain(root).orders,
        "swap-or-not": one_by_one(swap_or_not),
        "affine (control)": one_by_one(affine),
        "buffer of 1,000": one_by_one(buffer),
    }
