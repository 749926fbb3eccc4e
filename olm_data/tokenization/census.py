"""What documents a dataset holds: exact duplicates, and a fingerprint of all texts.

    docs.parquet of every shard (columns input, text_bytes, content_hash) -> Census

The fingerprint names the texts as a set with repetitions: the same documents give the same one,
whatever the order, the files they came from, the shards or the split. Reads each shard's columns
once, in bounded memory. Never: reads tokens, or decides which documents stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from olm_data.arrow_values import as_numpy
from olm_data.dataset.docs import DocumentRows
from olm_data.dataset.manifest import ShardInfo
from olm_data.dataset.record import damaged
from olm_data.dataset.tools import Copies
from olm_data.storage.store import Store
from olm_data.threads import in_order
from olm_data.tokenization.duplicates import fingerprints, later_copies

READERS = 4
"""Shards read at a time, so that a remote store's answers overlap."""

_COLUMNS = ["input", "text_bytes", "content_hash"]


@dataclass(frozen=True, kw_only=True)
class Census:
    """What the documents of all splits are.

    Attributes:
        documents: how many, of all splits.
        duplicates, duplicate_bytes: documents that are not the first of their kind, and the bytes
            of their texts.
        content: 32 hexadecimal digits that name the texts, in no order.
        inputs: for each input, the count and fingerprint of its documents.
    """

    documents: int
    duplicates: int
    duplicate_bytes: int
    content: str
    inputs: Sequence[tuple[int, int, int]]

    @property
    def copies(self) -> Copies:
        """What manifests keep of it."""
        return Copies(self.duplicates, self.duplicate_bytes, self.content)

    def twins(self) -> list[tuple[int, int]]:
        """Return (later, first) pairs of inputs that hold the same documents, none empty."""
        first: dict[tuple[int, int, int], int] = {}
        pairs = []
        for index, key in enumerate(self.inputs):
            if key[0] and first.setdefault(key, index) != index:
                pairs.append((index, first[key]))
        return pairs


def take_census(shards: Iterable[tuple[Store, ShardInfo]], documents: int, inputs: int) -> Census:
    """Read the document columns of shards, given by store and name.

    Args:
        documents: how many they hold in all.
        inputs: number of inputs of the dataset.

    Raises:
        ValidationError: a docs.parquet is missing or damaged.
        ResourceError: no room for scratch files (24 bytes a document, with over 4 million).
    """
    shards = list(shards)
    sums = np.zeros((inputs, 2), np.uint64)
    counts = np.zeros(inputs, np.int64)

    def keys() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for columns in document_columns(shards):
            if (
                len(columns["input"])
                and not 0 <= columns["input"].min() <= columns["input"].max() < inputs
            ):
                raise damaged(shards[0][0].root, "document rows name inputs that are not there")
            marks = fingerprints(columns["content_hash"], columns["text_bytes"])
            np.add.at(sums, columns["input"], marks)
            counts[:] += np.bincount(columns["input"], minlength=inputs)
            yield columns["content_hash"], columns["text_bytes"]

    duplicates = duplicate_bytes = 0
    if shards:
        with shards[0][0].staging() as scratch:
            for numbers, sizes in later_copies(keys(), documents, scratch):
                duplicates += len(numbers)
                duplicate_bytes += int(sizes.sum())
    total = sums.sum(axis=0)
    return Census(
        documents=int(counts.sum()),
        duplicates=duplicates,
        duplicate_bytes=duplicate_bytes,
        content=f"{int(total[0]):016x}{int(total[1]):016x}",
        inputs=[
            (count, int(a), int(b)) for count, (a, b) in zip(counts.tolist(), sums, strict=True)
        ],
    )


def document_columns(shards: Sequence[tuple[Store, ShardInfo]]) -> Iterator[dict[str, np.ndarray]]:
    """Yield `input`, `text_bytes` and `content_hash` of each shard, as NumPy arrays."""
    return in_order(_columns, shards, READERS, ahead=READERS)


def _columns(shard: tuple[Store, ShardInfo]) -> dict[str, np.ndarray]:
    store, info = shard
    table = DocumentRows(store, info.name, info.documents).table(_COLUMNS)
    return {column: as_numpy(table[column]) for column in _COLUMNS}
