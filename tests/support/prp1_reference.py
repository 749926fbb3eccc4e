"""Order `prp1` written from docs/reference/mixture.md alone, in plain Python integers.

Slow and obvious on purpose: what the vectorised modules must agree with. It imports nothing of the
product.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence

MASK = (1 << 64) - 1


def keys(seed: int, name: str, epoch: int) -> list[int]:
    """Six round keys."""
    message = json.dumps([seed, name, epoch], separators=(",", ":"), ensure_ascii=False).encode()
    output = hashlib.blake2b(message, digest_size=48, person=b"olm-prp1").digest()
    return [int.from_bytes(output[i : i + 8], "little") for i in range(0, 48, 8)]


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def permute(p: int, n: int, key: Sequence[int]) -> int:
    a = math.isqrt(n - 1) + 1 if n > 1 else 1
    b = -(-n // a)

    def f(v: int, k: int, m: int) -> int:
        return ((mix(v ^ k) >> 32) * m) >> 32

    x = p
    while True:
        left, right = divmod(x, b)
        for i in (0, 2, 4):
            left = (left + f(right, key[i], a)) % a
            right = (right + f(left, key[i + 1], b)) % b
        x = left * b + right
        if x < n:
            return x


def slots(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """source and rank of each slot, by looking at every job for every slot."""
    block, k = sum(counts), sum(count > 0 for count in counts)
    if k == 1:
        only = next(s for s, count in enumerate(counts) if count)
        return [only] * block, list(range(block))
    big = 2 * k - 2
    jobs = {}
    for s, count in enumerate(counts):
        for j in range(count):
            release = -(-block * (j * big + 1) // (big * count)) - 1
            deadline = block * ((j + 1) * big - 1) // (big * count)
            jobs[s, j] = (release, deadline)
    source, rank = [], []
    for slot in range(block):
        ready = [
            (deadline, s, j) for (s, j), (release, deadline) in jobs.items() if release <= slot
        ]
        _, s, j = min(ready)
        del jobs[s, j]
        source.append(s)
        rank.append(j)
    return source, rank


def schedule(
    seed: int, sources: Sequence[tuple[str, int]], stages: Sequence[tuple[int, Sequence[int]]]
) -> list[tuple[int, int, int, int]]:
    """(stage, source, epoch, row) of every row of a run; stages are (rows, counts)."""
    drawn = [0] * len(sources)
    places = []
    for number, (rows, counts) in enumerate(stages):
        table, _ = slots(counts)
        for x in range(rows):
            s = table[x % len(table)]
            name, n = sources[s]
            epoch, p = divmod(drawn[s], n)
            places.append((number, s, epoch, permute(p, n, keys(seed, name, epoch))))
            drawn[s] += 1
    return places
