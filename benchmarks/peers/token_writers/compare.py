"""Are the ids of a peer the ids of ours? Documents are compared, not files.

    parts of (ids, ends) -> every document without BOS and EOS at its borders -> XXH3-128 -> list
    list of ours, list of a peer -> equal in order | equal in another order | k documents differ

Peers put BOS and EOS in different places, shard differently, and some shuffle, so the multiset of
documents decides, and the order is reported. Never: trust a document count or a token count alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from peers.token_writers.base import Part


@dataclass(frozen=True)
class Fingerprint:
    """One digest a document in stored order, and the tokens without BOS and EOS."""

    digests: list[bytes]
    tokens: int


@dataclass(frozen=True)
class Verdict:
    """Whether the ids are the same, and in words how that was found."""

    equal: bool
    text: str


def fingerprint(parts: Iterable[Part], borders: frozenset[int]) -> Fingerprint:
    """Digest every document; ids in `borders` (BOS, EOS) are cut from both ends of each.

    Raises:
        ValueError: the ends of a part do not cover its ids.
    """
    digests, tokens = [], 0
    for ids, ends in parts:
        if (int(ends[-1]) if len(ends) else 0) != len(ids) or np.any(np.diff(ends) < 0):
            raise ValueError(f"document ends do not cover the {len(ids)} ids of a part")
        wide = np.ascontiguousarray(ids, dtype=np.uint32)
        start = 0
        for end in ends.tolist():
            a, b = start, end
            while a < b and int(wide[a]) in borders:
                a += 1
            while b > a and int(wide[b - 1]) in borders:
                b -= 1
            digests.append(xxhash.xxh3_128_digest(wide[a:b].data))
            tokens += b - a
            start = end
    return Fingerprint(digests, tokens)


def compare(ours: Fingerprint, other: Fingerprint) -> Verdict:
    """Compare two outputs made from the same documents."""
    if ours.digests == other.digests:
        return Verdict(True, "equal, same order")
    missing = Counter(ours.digests) - Counter(other.digests)
    if not missing and len(ours.digests) == len(other.digests):
        return Verdict(True, "equal, other order")
    count = sum(missing.values())
    text = f"DIFFER: {count:,} of {len(ours.digests):,} documents are not in it"
    if len(other.digests) != len(ours.digests):
        text += f", it has {len(other.digests):,}"
    return Verdict(False, text)
