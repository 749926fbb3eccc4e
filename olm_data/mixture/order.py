"""Order `prp1`: which row of which source stands at row i of the run, as a pure function.

    row i -> stage -> block, slot -> source and rank                        (slot table, mixing.py)
    ordinal = rows of the source in earlier stages + block * count + rank
    epoch, k = divmod(ordinal, rows of the source)
    row in source = permute(k; n = rows of the source, keys = round_keys(seed, name, epoch))

Everything is vectorised and exact in 64-bit integers, and nothing has the size of a dataset: the
largest table is one block of slots a stage, built when the stage is first touched. Never: files,
clocks, global random state. docs/reference/mixture.md is the specification; the golden vectors in
tests/olm_data/golden freeze it. A change here is a new order version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from olm_data.canonical import canonical_json
from olm_data.mixture.shares import SlotTable, slot_table

VERSION = "prp1"
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
    return np.frombuffer(_key_bytes(seed, name, epoch), dtype="<u8")


@lru_cache(maxsize=1 << 16)
def _key_bytes(seed: int, name: str, epoch: int) -> bytes:
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
    x = (x ^ (x >> _U(30))) * _M1
    x = (x ^ (x >> _U(27))) * _M2
    return x ^ (x >> _U(31))


def ceil_sqrt(n: np.ndarray) -> np.ndarray:
    """Return the exact ceil(sqrt(n)) of uint64 values from 1 to 2^62."""
    root = np.sqrt(n.astype(np.float64)).astype(np.uint64)  # off by one at most
    root -= root * root > n
    root += root * root < n
    return root


_Cipher = Callable[[np.ndarray, np.ndarray, np.ndarray, Sequence[np.ndarray]], np.ndarray]


def _round(half: np.ndarray, modulus: np.ndarray, key: np.ndarray) -> np.ndarray:
    return ((mix64(half ^ key) >> _U(32)) * modulus) >> _U(32)


def _encrypt(x: np.ndarray, a: np.ndarray, b: np.ndarray, keys: Sequence[np.ndarray]) -> np.ndarray:
    left = x // b
    right = x - left * b
    for i in range(0, ROUNDS, 2):
        # Reduced sums: of s and s - m (which wraps around when s < m) the smaller one is s mod m.
        left = left + _round(right, a, keys[i])
        left = np.minimum(left, left - a)
        right = right + _round(left, b, keys[i + 1])
        right = np.minimum(right, right - b)
    return left * b + right


def _decrypt(x: np.ndarray, a: np.ndarray, b: np.ndarray, keys: Sequence[np.ndarray]) -> np.ndarray:
    left = x // b
    right = x - left * b
    for i in range(ROUNDS - 2, -1, -2):
        right = right - _round(left, b, keys[i + 1])
        right = np.minimum(right, right + b)
        left = left - _round(right, a, keys[i])
        left = np.minimum(left, left + a)
    return left * b + right


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


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with constant shares.

    Attributes:
        rows: rows of this stage.
        counts: rows of each source in one block of the stage.
        drawn: rows of each source in the whole stage, or None to compute them. Given, they spare
            building the slot tables of stages that are never touched; they are checked when one is.
    """

    rows: int
    counts: tuple[int, ...]
    drawn: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class RowPlace:
    """Where each of m rows of the run comes from.

    Attributes:
        stage: int32[m].
        source: int32[m], index into the schedule's sources.
        epoch: int64[m], how often the source was gone through before, from 0.
        row: int64[m], row inside the source.
    """

    stage: np.ndarray
    source: np.ndarray
    epoch: np.ndarray
    row: np.ndarray


class Schedule:
    """The order of all rows of a run.

    Args:
        seed: any integer; with a source's name and the epoch it keys the permutation.
        sources: (name, rows) of each source; a source that is drawn has at least one row.
        stages: in the order of the run.

    Raises:
        ValueError: counts that do not fit the sources, a drawn source without rows, or a total
            beyond 2^62 rows.
    """

    def __init__(
        self, seed: int, sources: Sequence[tuple[str, int]], stages: Sequence[Stage]
    ) -> None:
        self.seed = seed
        self.names = tuple(name for name, _ in sources)
        self.source_rows = np.array([rows for _, rows in sources], dtype=np.int64)
        self.stages = tuple(stages)
        self._tables: dict[tuple[int, ...], SlotTable] = {}
        for stage in self.stages:
            if len(stage.counts) != len(self.names) or stage.rows < 0:
                raise ValueError("a stage has one count for each source and no negative rows")
            if any(c and not n for c, n in zip(stage.counts, self.source_rows, strict=True)):
                raise ValueError("a source that is drawn has at least one row")
        if sum(stage.rows for stage in self.stages) > MAX_ROWS:
            raise ValueError("a schedule has at most 2^62 rows")
        self.stage_ends = np.cumsum([stage.rows for stage in self.stages], dtype=np.int64)
        self._starts = self.stage_ends - np.array([s.rows for s in self.stages], dtype=np.int64)
        self._counts = np.array(
            [s.counts for s in self.stages], dtype=np.int64
        )  # [stages, sources]
        drawn = [s.drawn or rows_by_source(s, self.table(i)) for i, s in enumerate(self.stages)]
        self._drawn_ends = np.cumsum(np.array(drawn, dtype=np.int64), axis=0)  # [stages, sources]
        self._base = self._drawn_ends - np.array(drawn, dtype=np.int64)

    @property
    def total_rows(self) -> int:
        """Rows of the run."""
        return int(self.stage_ends[-1]) if self.stages else 0

    def table(self, stage: int) -> SlotTable:
        """Return the slot table of a stage, building it on first use; equal counts share one."""
        wanted = self.stages[stage]
        table = self._tables.get(wanted.counts)
        if table is None:
            table = self._tables[wanted.counts] = slot_table(wanted.counts)
        if wanted.drawn is not None and rows_by_source(wanted, table) != wanted.drawn:
            raise ValueError(f"stage {stage}: the stated rows by source are not those of its table")
        return table

    def ordinal(self, rows: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (stage int32[m], source int32[m], ordinal int64[m]) of global rows int64[m].

        The ordinal counts how many rows of the same source the run has drawn before.

        Raises:
            IndexError: a row outside the run.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.total_rows:
            raise IndexError(f"a row is outside this run of {self.total_rows} rows")
        stages = np.searchsorted(self.stage_ends, rows, side="right").astype(np.int32)
        sources = np.empty(rows.shape, dtype=np.int32)
        ordinals = np.empty(rows.shape, dtype=np.int64)
        for stage in np.unique(stages).tolist():
            here = stages == stage
            table = self.table(stage)
            block, slot = np.divmod(rows[here] - self._starts[stage], len(table.source))
            source = table.source[slot]
            sources[here] = source
            ordinals[here] = (
                self._base[stage, source] + block * self._counts[stage, source] + table.rank[slot]
            )
        return stages, sources, ordinals

    def locate(self, rows: Any) -> RowPlace:
        """Return the place of each of the global rows int64[m].

        Raises:
            IndexError: a row outside the run.
        """
        stage, source, ordinal = self.ordinal(rows)
        size = self.source_rows[source]
        epoch, k = np.divmod(ordinal, size)
        return RowPlace(stage, source, epoch, permute(k, size, self._keys(source, epoch)))

    def rows_of(self, source: int, row: int) -> np.ndarray:
        """Return the global rows, ascending int64, at which row `row` of `source` is seen.

        The inverse of `locate`: one value for each epoch that reaches the row.

        Raises:
            IndexError: no such source or row.
        """
        return self.sightings(source, np.array([row], np.int64))[0]

    def sightings(self, source: int, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return where rows int64[m] of `source` are seen, in all epochs.

        Returns:
            int64[n] global rows, ascending, and int64[n] the row of the source each of them is.

        Raises:
            IndexError: no such source or row.
        """
        size, wanted = int(self.source_rows[source]), np.asarray(rows, dtype=np.int64)
        outside = wanted[(wanted < 0) | (wanted >= size)]
        if outside.size:
            raise IndexError(f"row {outside[0]} of a source of {size} rows")
        drawn = int(self._drawn_ends[-1, source]) if self.stages else 0
        epochs = np.repeat(np.arange(-(-drawn // size), dtype=np.int64), wanted.size)
        wanted = np.tile(wanted, epochs.size // max(wanted.size, 1))
        if not epochs.size:
            return epochs, wanted
        keys = self._keys(np.full(epochs.shape, source), epochs)
        ordinals = epochs * size + unpermute(wanted, size, keys)
        wanted, ordinals = wanted[ordinals < drawn], ordinals[ordinals < drawn]
        stages = np.searchsorted(self._drawn_ends[:, source], ordinals, side="right")
        found = np.empty(ordinals.shape, dtype=np.int64)
        for stage in np.unique(stages).tolist():
            here = stages == stage
            table = self.table(stage)
            block, rank = np.divmod(
                ordinals[here] - self._base[stage, source], self._counts[stage, source]
            )
            slot = table.slots[table.first[source] + rank]
            found[here] = self._starts[stage] + block * len(table.source) + slot
        order = np.argsort(found)
        return found[order], wanted[order]

    def _keys(self, source: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """Return uint64[m, 6] round keys of m (source, epoch) pairs."""
        epochs, which = np.unique(epoch, return_inverse=True)
        pairs, index = np.unique(source * np.int64(epochs.size) + which, return_inverse=True)
        each = [(p // epochs.size, int(epochs[p % epochs.size])) for p in pairs.tolist()]
        keys = b"".join([_key_bytes(self.seed, self.names[s], e) for s, e in each])
        return np.frombuffer(keys, dtype="<u8").reshape(-1, ROUNDS)[index]


def rows_by_source(stage: Stage, table: SlotTable) -> tuple[int, ...]:
    """Return how many rows of each source a stage draws: whole blocks and the part of one."""
    blocks, rest = divmod(stage.rows, len(table.source))
    before = table.before(rest).tolist()
    return tuple(blocks * count + part for count, part in zip(stage.counts, before, strict=True))
