"""Packing `document`: rows of its own for each document, padded.

A document longer than a row goes on in the next one. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from olm_data.dataset.dataset import Dataset
from olm_data.packing.base import Documents, PackedRows, Packing, PackingCost, cut_documents


class DocumentPacking(Packing, frozen=True):
    """Each document in rows of its own."""

    name: ClassVar[str] = "document"

    def pack(
        self, dataset: Dataset, documents: Documents, sequence_length: int, cost: PackingCost
    ) -> Iterator[PackedRows]:
        """Yield the rows of the documents, in order."""
        for starts, lengths in documents:
            counts = -(-lengths // sequence_length)
            rows, tokens = int(counts.sum()), int(lengths.sum())
            cost.rows += rows
            cost.tokens += tokens
            cost.padding += rows * sequence_length - tokens
            cost.cut_long += int((lengths > sequence_length).sum())
            yield from cut_documents(starts, lengths, counts, sequence_length)
