"""Exact duplicates: documents with the same content hash and the same number of bytes of text.

    docs.parquet of every shard, or parts in input order: hash uint64[d], bytes int64[d]
        -> (more documents than fit: spooled to a scratch folder, a file for each range of hashes)
        -> range by range, sorted: every document but the first of its kind, by its number
    docs.parquet of every shard -> DocumentCounts: duplicates, and a fingerprint of all texts

Hashes are uniform, so ranges are of one size; a text that comes a billion times makes one range
long, not the memory, as only the first of each kind is carried from piece to piece. Memory is about
60 bytes for each of 2 * `most` documents. The fingerprint names the texts as a set with
repetitions: the same documents give the same one, whatever the order, the files they came from, the
shards or the split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from olm_data.arrow_values import as_numpy
from olm_data.dataset.docs import DocumentRows
from olm_data.dataset.manifest import ShardInfo
from olm_data.dataset.record import damaged
from olm_data.dataset.tools import Copies
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store
from olm_data.threads import in_order

MOST = 1 << 22
"""Documents sorted at a time: about 250 MiB, twice that at worst."""

SHARDS_AHEAD = 4
"""Shards read at a time, so that a remote store's answers overlap."""

Keys = tuple[np.ndarray, np.ndarray]
"""Content hashes uint64[d] and bytes of text int64[d] of documents, in input order."""

_COLUMNS = ["input", "content_hash", "text_bytes"]
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
    numbered = pieces(_numbered(parts), most)
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


@dataclass(frozen=True)
class DocumentCounts:
    """What the documents of all splits are.

    Attributes:
        copies: how many are not the first of their kind, and the fingerprint of all texts.
        inputs: for each input, the count and fingerprint of its documents.
    """

    copies: Copies
    inputs: Sequence[tuple[int, int, int]]

    def equal_inputs(self) -> list[tuple[int, int]]:
        """Return (later, first) pairs of inputs that hold the same documents, none empty."""
        first: dict[tuple[int, int, int], int] = {}
        pairs = []
        for index, key in enumerate(self.inputs):
            if key[0] and first.setdefault(key, index) != index:
                pairs.append((index, first[key]))
        return pairs


def count_documents(
    shards: Sequence[tuple[Store, ShardInfo]], documents: int, inputs: int
) -> DocumentCounts:
    """Read the document columns of shards, given by store and name.

    Args:
        documents: how many they hold in all.
        inputs: number of inputs of the dataset.

    Raises:
        ValidationError: a docs.parquet is missing or damaged.
        ResourceError: no room for scratch files (24 bytes a document, with over 4 million).
    """
    sums, counts = np.zeros((inputs, 2), np.uint64), np.zeros(inputs, np.int64)

    def keys() -> Iterator[Keys]:
        for index, hashes, sizes in _columns(shards):
            if len(index) and not 0 <= index.min() <= index.max() < inputs:
                raise damaged(shards[0][0].root, "document rows name inputs that are not there")
            np.add.at(sums, index, fingerprints(hashes, sizes))
            counts[:] += np.bincount(index, minlength=inputs)
            yield hashes, sizes

    duplicates = duplicate_bytes = 0
    if shards:
        with shards[0][0].staging() as scratch:
            for numbers, sizes in later_copies(keys(), documents, scratch):
                duplicates += len(numbers)
                duplicate_bytes += int(sizes.sum())
    first, second = sums.sum(axis=0).tolist()
    return DocumentCounts(
        Copies(duplicates, duplicate_bytes, f"{first:016x}{second:016x}"),
        [(count, a, b) for count, (a, b) in zip(counts.tolist(), sums.tolist(), strict=True)],
    )


def stored_keys(shards: Sequence[tuple[Store, ShardInfo]]) -> Iterator[Keys]:
    """Yield the keys of the documents of each shard, given by store and name."""
    return ((hashes, sizes) for _, hashes, sizes in _columns(shards))


def _columns(shards: Sequence[tuple[Store, ShardInfo]]) -> Iterator[list[np.ndarray]]:
    """Yield the index of the input, content hash and bytes of text of each shard's documents."""

    def read(shard: tuple[Store, ShardInfo]) -> list[np.ndarray]:
        store, info = shard
        table = DocumentRows(store, info.name, info.documents).table(_COLUMNS)
        return [as_numpy(table[column]) for column in _COLUMNS]

    return in_order(read, shards, SHARDS_AHEAD, ahead=SHARDS_AHEAD)


def _numbered(parts: Iterable[Keys]) -> Iterator[np.ndarray]:
    first = 0
    for hashes, sizes in parts:
        rows = np.empty(len(hashes), _SPOOLED)
        rows["hash"], rows["bytes"] = hashes, sizes
        rows["number"] = np.arange(first, first + len(hashes))
        first += len(hashes)
        yield rows


def pieces(rows: Iterable[np.ndarray], most: int) -> Iterator[np.ndarray]:
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
