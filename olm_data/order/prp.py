"""Keyed permutations `prp1` of range(n): exact, vectorised, an exact inverse, no table. Pure.

    keys = round_keys(seed, name, epoch)
    row = permute(position, n, keys)            position = unpermute(row, n, keys)

docs/reference/mixture.md is the specification; the golden vectors in tests/olm_data/order/golden
freeze it. A change here is a new order version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from olm_data.bounded_json import canonical_json

ROUNDS = 6
MAX_ROWS = 1 << 62

_CHUNK = 1 << 14  # elements worked on at once: the temporaries stay in the first caches
_U = np.uint64
_M1, _M2 = _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)


def round_keys(seed: int, name: str, epoch: int) -> np.ndarray:
    """Return the read-only uint64[6] round keys of one epoch of one source.

    BLAKE2b with 48 bytes of output and personalisation `olm-prp1` over the canonical JSON of
    `[seed, name, epoch]`, read as six little-endian integers.
    """
    return np.frombuffer(key_bytes(seed, name, epoch), dtype="<u8")


@lru_cache(maxsize=1 << 16)
def key_bytes(seed: int, name: str, epoch: int) -> bytes:
    """Return the 48 bytes of `round_keys`."""
    message = canonical_json([seed, name, epoch])
    return hashlib.blake2b(message, digest_size=8 * ROUNDS, person=b"olm-prp1").digest()


def permute(k: Any, n: Any, keys: np.ndarray) -> np.ndarray:
    """Apply a keyed permutation of range(n) to positions `k`.

    A mixed-radix Feistel network: x = l * b + r with l in Z_a, r in Z_b, a = ceil(sqrt n),
    b = ceil(n / a); in turn l += F_i(r) mod a and r += F_i(l) mod b for six rounds, with
    F_i(v) = floor(floor(mix64(v xor key_i) / 2^32) * m / 2^32) for modulus m. Results outside
    range(n) are encrypted again until they are inside (J. Black and P. Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002).

    Args:
        k: integers in range(n), any shape.
        n: size of the range, 1 .. 2^62, scalar or broadcast against `k`.
        keys: uint64[6], or uint64[..., 6] with one row of keys for each element of `k`.

    Returns:
        int64 array of the broadcast shape of `k` and `n`.

    Raises:
        IndexError: a position outside its range.
    """
    return _apply(_encrypt, k, n, keys)


def unpermute(k: Any, n: Any, keys: np.ndarray) -> np.ndarray:
    """The exact inverse of `permute`, with the same arguments."""
    return _apply(_decrypt, k, n, keys)


def mix64(x: np.ndarray) -> np.ndarray:
    """Finalise uint64 values by multiply-xorshift.

    Variant 13 of D. Stafford's mixers, the one SplitMix64 uses (G. Steele, D. Lea, C. Flood, "Fast
    splittable pseudorandom number generators", 2014).
    """
    result: np.ndarray = x >> _U(30)
    result ^= x
    for multiplier, shift in ((_M1, _U(27)), (_M2, _U(31))):
        result *= multiplier  # in place: fewer temporaries stay in the first caches
        result ^= result >> shift
    return result


def ceil_sqrt(n: np.ndarray) -> np.ndarray:
    """Return the exact ceil(sqrt(n)) of uint64 values from 1 to 2^62."""
    root = np.sqrt(n.astype(np.float64)).astype(np.uint64)  # off by one at most
    root -= root * root > n
    root += root * root < n
    return root


_Cipher = Callable[[np.ndarray, np.ndarray, np.ndarray, Sequence[np.ndarray]], np.ndarray]


def _round(half: np.ndarray, modulus: np.ndarray, key: np.ndarray) -> np.ndarray:
    result = mix64(half ^ key)
    result >>= _U(32)
    result *= modulus
    result >>= _U(32)
    return result


def _encrypt(x: np.ndarray, a: np.ndarray, b: np.ndarray, keys: Sequence[np.ndarray]) -> np.ndarray:
    left = x // b
    right = x - left * b
    for i in range(0, ROUNDS, 2):
        # Reduced sums: of s and s - m (which wraps around when s < m) the smaller one is s mod m.
        left = left + _round(right, a, keys[i])
        left = np.minimum(left, left - a)
        right = right + _round(left, b, keys[i + 1])
        right = np.minimum(right, right - b)
    result: np.ndarray = left * b + right
    return result


def _decrypt(x: np.ndarray, a: np.ndarray, b: np.ndarray, keys: Sequence[np.ndarray]) -> np.ndarray:
    left = x // b
    right = x - left * b
    for i in range(ROUNDS - 2, -1, -2):
        right = right - _round(left, b, keys[i + 1])
        right = np.minimum(right, right + b)
        left = left - _round(right, a, keys[i])
        left = np.minimum(left, left + a)
    result: np.ndarray = left * b + right
    return result


def _apply(crypt: _Cipher, k: Any, n: Any, keys: np.ndarray) -> np.ndarray:
    positions, size = np.asarray(k, dtype=np.int64), np.asarray(n, dtype=np.int64)
    if (size < 1).any() or (size > MAX_ROWS).any():
        raise IndexError("a permutation has 1 to 2^62 elements")
    if (positions < 0).any() or (positions >= size).any():
        raise IndexError("a position is outside its permutation")
    shape = np.broadcast_shapes(positions.shape, size.shape, keys.shape[:-1])
    x = np.broadcast_to(positions, shape).reshape(-1).astype(np.uint64)
    if size.ndim:
        size = np.broadcast_to(size, shape).reshape(-1)
    if keys.ndim > 1:
        keys = np.broadcast_to(keys, (*shape, ROUNDS)).reshape(-1, ROUNDS)
    n_u = size.astype(np.uint64)
    a = ceil_sqrt(n_u)
    b = (n_u + a - _U(1)) // a
    columns = [n_u, a, b, *np.ascontiguousarray(keys.T)]
    for start in range(0, x.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        _walk(crypt, x[part], _select(columns, part))
    return x.astype(np.int64).reshape(shape)


def _select(columns: list[np.ndarray], part: slice | np.ndarray) -> list[np.ndarray]:
    """Take some elements of each column; values common to all elements are scalars and stay."""
    return [column[part] if column.ndim else column for column in columns]


def _walk(crypt: _Cipher, x: np.ndarray, columns: list[np.ndarray]) -> None:
    """Encrypt `x` in place, walking each element's cycle until it is below its n again."""
    n, a, b, *keys = columns
    x[...] = crypt(x, a, b, keys)
    outside = np.flatnonzero(x >= n)
    while outside.size:
        n, a, b, *keys = _select(columns, outside)
        walked = crypt(x[outside], a, b, keys)
        x[outside] = walked
        outside = outside[walked >= n]
