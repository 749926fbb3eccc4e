"""Exact duplicates: documents with the same content hash and the same number of bytes of text.

    parts in input order: hash uint64[d], bytes int64[d]
        -> (more documents than fit: spooled to a scratch folder, a file for each range of hashes)
        -> range by range, sorted: every document but the first of its kind, by its number

Hashes are uniform, so ranges are of one size; a text that comes a billion times makes one range
long, not the memory, as only the first of each kind is carried from piece to piece. Memory is about
60 bytes for each of 2 * `most` documents. Never: compare texts, or depend on anything but the keys
and their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from olm_data.storage.disk import io_errors

MOST = 1 << 22
"""Documents sorted at a time: about 250 MiB, twice that at worst."""

Keys = tuple[np.ndarray, np.ndarray]
"""Content hashes uint64[d] and bytes of text int64[d] of documents, in input order."""

_SPOOLED = np.dtype([("hash", "<u8"), ("bytes", "<i8"), ("number", "<i8")])
_MIX = tuple(np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD))


def later_copies(
    parts: Iterable[Keys], documents: int, scratch: Path, *, most: int = MOST
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the documents that are not the first of their kind.

    Args:
        parts: keys of all documents in input order; document numbers count over all parts.
        documents: how many there are.
        scratch: an empty folder; used when there are more than `most` documents, 24 bytes each.
        most: documents to sort at a time.

    Yields:
        numbers int64[k] and bytes of text int64[k]; each such document once, in no special order.
    """
    numbered = _pieces(_numbered(parts), most)
    if documents <= most:
        yield from _later(numbered)
        return
    ranges = -(-documents // most)
    with io_errors(str(scratch), writing=True):
        for piece in numbered:
            _spool(piece, scratch, ranges)
    for index in range(ranges):
        path = scratch / f"{index}.keys"
        if path.exists():
            yield from _later(_spooled(path, most))
            path.unlink()


def fingerprints(hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return uint64[d, 2]: two numbers a document whose sums (mod 2^64) name a set of documents.

    The sums do not depend on order, files or shards. They tell texts apart by chance, not against
    an adversary.

    Args:
        hashes: uint64[d]. sizes: int64[d], bytes of text.
    """
    lanes = []
    for seed in _MIX[:2]:
        value = (hashes + sizes.astype(np.uint64) * seed) * _MIX[2]
        value ^= value >> np.uint64(29)
        value *= seed
        lanes.append(value ^ (value >> np.uint64(32)))
    return np.stack(lanes, axis=1)


def _numbered(parts: Iterable[Keys]) -> Iterator[np.ndarray]:
    first = 0
    for hashes, sizes in parts:
        rows = np.empty(len(hashes), _SPOOLED)
        rows["hash"], rows["bytes"] = hashes, sizes
        rows["number"] = np.arange(first, first + len(hashes))
        first += len(hashes)
        yield rows


def _pieces(rows: Iterable[np.ndarray], most: int) -> Iterator[np.ndarray]:
    """Join small arrays and cut large ones: at most `most` rows each."""
    waiting: list[np.ndarray] = []
    held = 0
    for part in rows:
        while len(part):
            waiting.append(part[: most - held])
            held += len(waiting[-1])
            part = part[len(waiting[-1]) :]
            if held == most:
                yield np.concatenate(waiting)
                waiting, held = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _spool(rows: np.ndarray, scratch: Path, ranges: int) -> None:
    """Append the rows to the files of their ranges, in order."""
    index = ((rows["hash"] >> np.uint64(32)) * np.uint64(ranges)) >> np.uint64(32)
    order = np.argsort(index, kind="stable")
    borders = np.searchsorted(index[order], np.arange(ranges + 1, dtype=np.uint64))
    for number in np.flatnonzero(np.diff(borders)).tolist():
        with open(scratch / f"{number}.keys", "ab") as file:  # thousands may not stay open
            rows[order[borders[number] : borders[number + 1]]].tofile(file)


def _spooled(path: Path, most: int) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while len(rows := np.fromfile(file, _SPOOLED, count=most)):
            yield rows


def _later(pieces: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    hashes, sizes = np.zeros(0, np.uint64), np.zeros(0, np.int64)  # the first of each kind so far
    for rows in pieces:
        known = len(hashes)
        hashes = np.concatenate([hashes, rows["hash"]])
        sizes = np.concatenate([sizes, rows["bytes"]])
        order = np.argsort(hashes, kind="stable")  # equal keys stay in input order
        same = hashes[order][1:] == hashes[order][:-1]
        if np.any(same & (np.diff(sizes[order]) != 0)):  # one hash, two texts: hardly ever
            order = np.lexsort((sizes, hashes))
        hashes, sizes = hashes[order], sizes[order]
        copy = np.zeros(len(order), bool)
        copy[1:] = (hashes[1:] == hashes[:-1]) & (sizes[1:] == sizes[:-1])
        yield rows["number"][order[copy] - known], sizes[copy]
        hashes, sizes = hashes[~copy], sizes[~copy]
