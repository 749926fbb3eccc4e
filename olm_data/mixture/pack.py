"""From a dataset to its row plan: documents read from the shards' ends, a window at a time.

    Dataset --ends, shard by shard--> (starts, lengths) of whole windows --row_plan--> files, Waste

Never: read a token, hold more than a window of documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from olm_data.canonical import digest
from olm_data.dataset.dataset import Dataset
from olm_data.mixture.best_fit import Int64
from olm_data.mixture.row_plan import (
    WINDOW,
    PackedRows,
    RowPlan,
    StreamPacker,
    Waste,
    pack_best_fit,
    pack_documents,
    write,
)


class PlanInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a lock says of a source's row plan.

    Attributes:
        rows, pieces: how many there are.
        tokens: inputs in the rows; the other places are padding.
        cut: documents longer than a row, which lie in several.
        dropped: tokens in no row (remainders shorter than `min_tail`).
        most_pieces: pieces of the row that has most.
        sha256: of each file, by name.
    """

    rows: int
    pieces: int
    tokens: int
    cut: int
    dropped: int
    most_pieces: int
    sha256: dict[str, str]

    @property
    def folder(self) -> str:
        """Folder of the files, relative to the lock's: named by content, so locks can share it."""
        return f"row-plans/{digest(msgspec.to_builtins(self))[:16]}"


def documents(dataset: Dataset, window: int = WINDOW) -> Iterator[tuple[Int64, Int64]]:
    """Yield (first tokens, lengths), int64 [d] each, of all documents, window by window."""
    starts: list[Int64] = []
    lengths: list[Int64] = []
    held = first = 0
    for number in range(len(dataset.token_ends)):
        ends = dataset.shard(number).ends.astype(np.int64)
        sizes = np.diff(ends, prepend=0)
        starts.append(first + ends - sizes)
        lengths.append(sizes)
        first, held = int(dataset.token_ends[number]), held + len(sizes)
        while held >= window:
            joined, sizes = np.concatenate(starts), np.concatenate(lengths)
            yield joined[:window], sizes[:window]
            starts, lengths, held = [joined[window:]], [sizes[window:]], held - window
    if held:
        yield np.concatenate(starts), np.concatenate(lengths)


def packer(
    dataset: Dataset, packing: str, sequence_length: int, *, min_tail: int = 1, waste: Waste
) -> Callable[[Int64, Int64], PackedRows]:
    """Return what packs windows of documents, (first tokens, lengths), given one after another.

    Args:
        packing: of `packing.PACKINGS`.
        waste: is added to.
    """
    if packing == "best_fit":
        name = f"best_fit {dataset.digest} {sequence_length}"
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        return partial(
            pack_best_fit,
            sequence_length=sequence_length,
            key=key,
            min_tail=min_tail,
            waste=waste,
        )
    if packing == "document":
        return partial(pack_documents, sequence_length=sequence_length, waste=waste)
    return StreamPacker(sequence_length, waste).pack


def write_plan(
    dataset: Dataset, packing: str, sequence_length: int, folder: Path, *, min_tail: int = 1
) -> PlanInfo:
    """Write the row plan of a dataset into an existing local folder."""
    waste, most = Waste(), 0
    pack = packer(dataset, packing, sequence_length, min_tail=min_tail, waste=waste)

    def watched() -> Iterator[PackedRows]:
        nonlocal most
        for starts, lengths in documents(dataset):
            part = pack(starts, lengths)
            most = max(most, int(part.counts.max(initial=0)))
            yield part

    rows, pieces = write(folder, watched())
    return PlanInfo(
        rows=rows,
        pieces=pieces,
        tokens=waste.tokens,
        cut=waste.cut_long,
        dropped=waste.dropped,
        most_pieces=most,
        sha256=RowPlan.digests(folder),
    )
