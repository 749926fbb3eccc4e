"""Digests of documents' texts: what tells texts apart in holdout, sampling and duplicates. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import xxhash

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
