"""Packing of order `olmo-core`: rows as OLMo-core's `NumpyFSLDataset` cuts token files.

    ends of each shard -> rows of exactly S tokens, none over two shards -> pieces of documents

What is left of a shard is in no row. A row has no token that follows it, so its last position has
no label, as there. In a manifest and a lock it is `concat`, with that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.packing.base import Documents, PackedRows, PackingCost
from olm_data.packing.concat import Concat


class Instances(Concat, frozen=True):
    """The documents of each shard as one stream, cut into whole chunks of rows.

    Attributes:
        chunk_rows: rows of a chunk.
    """

    planned: ClassVar[bool] = True

    chunk_rows: int

    def pack(
        self, dataset: Dataset, documents: Documents, sequence_length: int, cost: PackingCost
    ) -> Iterator[PackedRows]:
        """Yield the rows of each shard: pieces of all its documents, S tokens a row."""
        for number, info in enumerate(dataset.manifest.shards):
            rows = info.tokens // (sequence_length * self.chunk_rows) * self.chunk_rows
            used, before = rows * sequence_length, int(dataset.token_ends[number]) - info.tokens
            ends = dataset.open_shard(number).ends.astype(np.int64)  # not kept open: may be many
            lengths = np.diff(ends, prepend=np.int64(0))
            apart = (ends <= used) & (
                (ends - lengths) // sequence_length != (ends - 1) // sequence_length
            )
            cost.rows += rows
            cost.tokens += used
            cost.cut_long += int((apart & (lengths > sequence_length)).sum())
            cost.cut_short += int((apart & (lengths <= sequence_length)).sum())
            cost.dropped += info.tokens - used
            stops = np.union1d(ends[ends < used], np.arange(1, rows + 1) * sequence_length)
            starts = np.concatenate([np.zeros(1, np.int64), stops])[: len(stops)]
            counts = np.bincount(starts // sequence_length, minlength=rows).astype(np.int64)
            yield PackedRows(before + starts, stops - starts, counts)
