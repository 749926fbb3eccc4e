"""Rows as OLMo-core's `NumpyFSLDataset` cuts token files: a row plan for order `olmo-core`.

    ends of each shard -> rows of exactly S tokens, none over two shards -> pieces of documents

What is left of a shard is in no row. A row has no token that follows it, so its last place has no
label, as there. Never: read a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.packing.row_plan import PackedRows, Waste


def instances(
    dataset: Dataset, sequence_length: int, chunk_rows: int, waste: Waste
) -> Iterator[PackedRows]:
    """Yield the rows of each shard: pieces of its documents, S tokens a row.

    Args:
        waste: is added to.
    """
    for number, info in enumerate(dataset.manifest.shards):
        rows = info.tokens // (sequence_length * chunk_rows) * chunk_rows
        used, before = rows * sequence_length, int(dataset.token_ends[number]) - info.tokens
        ends = dataset.open_shard(number).ends.astype(np.int64)  # not kept open: there may be many
        lengths = np.diff(ends, prepend=np.int64(0))
        apart = (ends <= used) & (
            (ends - lengths) // sequence_length != (ends - 1) // sequence_length
        )
        waste.rows += rows
        waste.tokens += used
        waste.cut_long += int((apart & (lengths > sequence_length)).sum())
        waste.cut_short += int((apart & (lengths <= sequence_length)).sum())
        waste.dropped += info.tokens - used
        stops = np.union1d(ends[ends < used], np.arange(1, rows + 1) * sequence_length)
        starts = np.concatenate([np.zeros(1, np.int64), stops])[: len(stops)]
        counts = np.bincount(starts // sequence_length, minlength=rows).astype(np.int64)
        yield PackedRows(before + starts, stops - starts, counts)
