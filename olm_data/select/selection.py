"""Which documents a user's selection takes: by id, and by a draw. Pure: values in, masks out.

    ids of a batch + IdSet          -> which of them are in the set, and where   (--exclude-ids)
    content hashes + share and seed -> which are drawn                           (--sample)

A draw depends on the text and the seed alone: not on position, file, worker or other documents. It
is independent of the holdout, which compares the bare content hash.

Also: digests of documents' texts: what tells texts apart in holdout, sampling and duplicates.
Pure.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from olm_data.bounded_json import canonical_json
from olm_data.order.prp import mix64

if TYPE_CHECKING:
    import pyarrow as pa


DIGEST_BYTES = 16
"""Bytes of a document's digest, XXH3-128: fast, and for telling texts apart, not for security."""


def document_digests(data: np.ndarray, offsets: np.ndarray) -> bytes:
    """Return the XXH3-128 digest of each document, 16 bytes each, concatenated.

    Args:
        data: uint8 [n], text of the documents end to end.
        offsets: int64 [d + 1] into `data`.
    """
    view, digest = np.ascontiguousarray(data).data, xxhash.xxh3_128_digest
    at = offsets.tolist()
    return b"".join([digest(view[a:b]) for a, b in pairwise(at)])


def content_hashes(digests: bytes) -> np.ndarray:
    """Return uint64 [d]: the first 8 bytes, little-endian, of each 16-byte digest."""
    return np.frombuffer(digests, "<u8")[::2].astype(np.uint64)


HASH_SPACE = 1 << 64


def sample_key(seed: int) -> np.uint64:
    """Return the key of a seed's draw.

    8 bytes of BLAKE2b with personalisation `olm-sample` over the canonical JSON of `[seed]`, read
    as a little-endian integer.
    """
    message = canonical_json([seed])
    digest = hashlib.blake2b(message, digest_size=8, person=b"olm-sample").digest()
    result: np.uint64 = np.frombuffer(digest, "<u8")[0]
    return result


def drawn(hashes: np.ndarray, share: Fraction, seed: int) -> np.ndarray:
    """Return bool [d]: which documents a sample holds.

    A document is drawn if mix64(content hash xor key) < floor(share * 2^64), with `mix64` of
    `order.py`. So a smaller share of the same seed is a part of a larger one.

    Args:
        hashes: uint64 [d], content hashes.
        share: above 0 and below 1.
        seed: any integer.
    """
    return mix64(hashes ^ sample_key(seed)) < np.uint64(int(share * HASH_SPACE))


_HEADER_BYTES = 128


class IdSet:
    """A set of ids, as sorted XXH3-128 digests: 16 bytes an id, whatever the id's length.

    Args:
        digests: uint64 [n, 2], the digests as two little-endian halves each, in rising order.

    Attributes:
        found: bool [n], which ids `find` has met.
    """

    def __init__(self, digests: np.ndarray) -> None:
        self._first = np.ascontiguousarray(digests[:, 0])
        self._second = np.ascontiguousarray(digests[:, 1])
        self.found = np.zeros(len(digests), bool)

    @classmethod
    def of(cls, parts: Iterable[bytes]) -> IdSet:
        """Return the set of digests, 16 bytes each, given in any order and in parts."""
        halves = [np.zeros(0, np.uint64), *(np.frombuffer(part, "<u8") for part in parts)]
        pairs = np.concatenate(halves).astype(np.uint64).reshape(-1, 2)
        pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        new = np.ones(len(pairs), bool)
        new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
        return cls(pairs[new])

    @classmethod
    def from_npy(cls, data: bytes) -> IdSet:
        """Return the set that `to_npy` wrote.

        Raises:
            ValueError: the bytes are no such array.
        """
        count = max(len(data) - _HEADER_BYTES, 0) // 16
        if data[:_HEADER_BYTES] != _header(count) or len(data) != _HEADER_BYTES + 16 * count:
            raise ValueError("no array of digests")
        return cls(np.frombuffer(data, "<u8", offset=_HEADER_BYTES).reshape(count, 2))

    def __len__(self) -> int:
        return len(self._first)

    @property
    def sha256(self) -> str:
        """Digest of the set: of its sorted digests' bytes."""
        return hashlib.sha256(self._pairs().tobytes()).hexdigest()

    def to_npy(self) -> bytes:
        """Return the set as a NumPy file: uint64 [n, 2], sorted."""
        return _header(len(self)) + self._pairs().astype("<u8").tobytes()

    def fresh(self) -> IdSet:
        """Return the same set with nothing found yet."""
        return IdSet(self._pairs())

    def find(self, ids: pa.Array) -> np.ndarray:
        """Return bool [d]: which ids are in the set; null is in no set. Notes them as found.

        Args:
            ids: string array [d].
        """
        import pyarrow as pa

        from olm_data.arrow_values import as_numpy

        known = as_numpy(ids.is_valid())
        text = ids.drop_null().cast(pa.large_binary())
        _, offsets, data = text.buffers()
        at = np.frombuffer(offsets, np.int64)[text.offset : text.offset + len(text) + 1]
        raw = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
        digests = np.frombuffer(document_digests(raw, at), "<u8").reshape(-1, 2)
        result = np.zeros(len(ids), bool)
        result[known] = self._find(digests)
        return result

    def _find(self, digests: np.ndarray) -> np.ndarray:
        result = np.zeros(len(digests), bool)
        place = np.searchsorted(self._first, digests[:, 0])
        rest = np.flatnonzero(place < len(self))
        while len(rest):  # goes round again only if two ids share the first half of their digest
            here = place[rest]
            rest = rest[self._first[here] == digests[rest, 0]]
            here = place[rest]
            equal = self._second[here] == digests[rest, 1]
            result[rest[equal]] = True
            self.found[here[equal]] = True
            rest = rest[~equal]
            place[rest] += 1
            rest = rest[place[rest] < len(self)]
        return result

    def _pairs(self) -> np.ndarray:
        return np.stack([self._first, self._second], axis=1)


def _header(count: int) -> bytes:
    """Return the NumPy header of `count` pairs of digests, the one that `np.save` writes."""
    file = io.BytesIO()
    descr = {"descr": "<u8", "fortran_order": False, "shape": (count, 2)}
    np.lib.format.write_array_header_1_0(file, descr)
    return file.getvalue()
