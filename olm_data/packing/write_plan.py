"""From a dataset to its row plan: documents read from the shards' ends, a window at a time.

Dataset --ends, shard by shard--> windows of documents --Packing.pack--> files, PlanInfo
        `-docs.parquet--> ViewScan: which of them
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.view import ViewScan
from olm_data.packing.base import Int64, PackedRows, Packing, PackingCost
from olm_data.packing.row_plan import PlanInfo, RowPlan, write

WINDOW = 1 << 22
"""Documents packed at once: the memory of a plan does not grow with the dataset."""

_AT_ONCE = 1 << 20  # documents of a shard looked at together


def documents(
    dataset: Dataset, window: int, scan: ViewScan | None = None
) -> Iterator[tuple[Int64, Int64]]:
    """Yield (first tokens, lengths), int64 [d] each, of all documents, window by window.

    Every window but the last has `window` documents. With a scan, of those that its view keeps.
    """
    starts: list[Int64] = []
    lengths: list[Int64] = []
    held = 0
    for first, sizes in _some_documents(dataset, scan):
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


def _some_documents(dataset: Dataset, scan: ViewScan | None) -> Iterator[tuple[Int64, Int64]]:
    """Yield (first tokens, lengths) of the documents that a view keeps, `_AT_ONCE` at most each."""
    before = 0
    for number, info in enumerate(dataset.manifest.shards):
        if info.documents:
            shard = dataset.open_shard(number)  # not kept open: there may be many
            masks = _all(info.documents) if scan is None else scan.chosen(number, shard)
            for low, mask in masks:
                ends = shard.ends[low : low + len(mask)].astype(np.int64)
                sizes = np.diff(ends, prepend=int(shard.ends[low - 1]) if low else 0)
                if scan is not None:
                    scan.count(sizes[mask])
                yield (before + ends - sizes)[mask], sizes[mask]
        before = int(dataset.token_ends[number])


def _all(count: int) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    for low in range(0, count, _AT_ONCE):
        yield low, np.ones(min(_AT_ONCE, count - low), bool)


def write_plan(
    dataset: Dataset,
    packing: Packing,
    sequence_length: int,
    folder: Path,
    scan: ViewScan | None = None,
) -> PlanInfo:
    """Write the row plan of a dataset, or of a view of it, into an existing local folder.

    Raises:
        ResourceError: the disk is full or fails.
    """
    cost, most = PackingCost(), 0

    def watched() -> Iterator[PackedRows]:
        nonlocal most
        for part in packing.pack(dataset, documents(dataset, WINDOW, scan), sequence_length, cost):
            most = max(most, int(part.counts.max(initial=0)))
            yield part

    rows, pieces = write(folder, watched())
    return PlanInfo(
        rows=rows,
        pieces=pieces,
        tokens=cost.tokens,
        cut=cost.cut_long,
        dropped=cost.dropped,
        most_pieces=most,
        sha256=RowPlan.digests(folder),
    )
