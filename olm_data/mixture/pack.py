"""From a dataset to its row plan: documents read from the shards' ends, a window at a time.

    Dataset --ends, shard by shard--> (starts, lengths) of whole windows --row_plan--> files, Waste
            `-docs.parquet--> View: which of them

Never: read a token, hold more than a window of documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.bounded_json import Size
from olm_data.canonical import digest
from olm_data.dataset.dataset import Dataset
from olm_data.mixture.view import View
from olm_data.packing.best_fit import Int64
from olm_data.packing.instances import instances
from olm_data.packing.row_plan import (
    WINDOW,
    PackedRows,
    RowPlan,
    StreamPacker,
    Waste,
    pack_best_fit,
    pack_documents,
    write,
)

STRETCH = 1 << 20
"""Documents of a shard looked at together."""


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

    rows: Size
    pieces: Size
    tokens: Size
    cut: Size
    dropped: Size
    most_pieces: Size
    sha256: dict[str, str]

    @property
    def folder(self) -> str:
        """Folder of the files, relative to the lock's: named by content, so locks can share it."""
        return f"row-plans/{digest(msgspec.to_builtins(self))[:16]}"


def documents(
    dataset: Dataset, window: int = WINDOW, view: View | None = None
) -> Iterator[tuple[Int64, Int64]]:
    """Yield (first tokens, lengths), int64 [d] each, of all documents, window by window.

    Every window but the last has `window` documents. With a view, of those that it keeps.
    """
    starts: list[Int64] = []
    lengths: list[Int64] = []
    held = 0
    for first, sizes in _stretches(dataset, view):
        while len(first):
            taken = min(window - held, len(first))
            starts.append(first[:taken])
            lengths.append(sizes[:taken])
            first, sizes, held = first[taken:], sizes[taken:], held + taken
            if held == window:
                yield np.concatenate(starts), np.concatenate(lengths)
                starts, lengths, held = [], [], 0
    if held:
        yield np.concatenate(starts), np.concatenate(lengths)


def _stretches(dataset: Dataset, view: View | None) -> Iterator[tuple[Int64, Int64]]:
    """Yield (first tokens, lengths) of the documents that a view keeps, at most `STRETCH` each."""
    before = 0
    for number, info in enumerate(dataset.manifest.shards):
        if info.documents:
            shard = dataset.open_shard(number)  # not kept open: there may be many
            masks = _all(info.documents) if view is None else view.chosen(dataset, number, shard)
            for low, mask in masks:
                ends = shard.ends[low : low + len(mask)].astype(np.int64)
                sizes = np.diff(ends, prepend=int(shard.ends[low - 1]) if low else 0)
                if view is not None:
                    view.count(sizes[mask])
                yield (before + ends - sizes)[mask], sizes[mask]
        before = int(dataset.token_ends[number])


def _all(count: int) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    for low in range(0, count, STRETCH):
        yield low, np.ones(min(STRETCH, count - low), bool)


def packer(
    dataset: Dataset, packing: str, sequence_length: int, *, min_tail: int = 1, waste: Waste
) -> Callable[[Int64, Int64], Iterator[PackedRows]]:
    """Return what packs windows of documents, (first tokens, lengths), given one after another.

    The rows of a window must be taken to the last before the next window is given.

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
    dataset: Dataset,
    packing: str,
    sequence_length: int,
    folder: Path,
    *,
    min_tail: int = 1,
    view: View | None = None,
    shard_rows: int | None = None,
) -> PlanInfo:
    """Write the row plan of a dataset, or of a view of it, into an existing local folder.

    Args:
        shard_rows: cut as OLMo-core's instances, so many rows together, whatever the packing.
    """
    waste, most = Waste(), 0
    pack = packer(dataset, packing, sequence_length, min_tail=min_tail, waste=waste)

    def watched() -> Iterator[PackedRows]:
        nonlocal most
        parts: Iterator[PackedRows]
        if shard_rows is None:
            parts = (
                part
                for starts, lengths in documents(dataset, view=view)
                for part in pack(starts, lengths)
            )
        else:
            parts = instances(dataset, sequence_length, shard_rows, waste)
        for part in parts:
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
