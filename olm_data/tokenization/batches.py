"""Documents between the stages of a task: with digests of their texts, then as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from olm_data.sources.base import DocumentBatch, Drop


@dataclass(frozen=True, slots=True)
class HashedBatch:
    """Documents and the digests of their texts.

    Attributes:
        batch: the documents.
        digests: 16 bytes a document, concatenated; see `document_digests`.
    """

    batch: DocumentBatch
    digests: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedBatch:
    """Documents as token ids, without their text.

    Attributes:
        ids: uint32 [t], bodies end to end, no BOS, no EOS.
        offsets: int64 [d + 1] into `ids`.
        rows: d rows of `docs.parquet`.
        inputs: int32 [d], index of each document's input.
        digests: as in `HashedBatch`.
        text_bytes: bytes of all texts.
        special_hits: strings in the texts that spell a special token.
        unknown: int64 [d], unknown tokens of each document.
        by_reference: documents encoded by the reference in the encoder's stead.
        dropped, skipped, replaced, rows_in: as in `DocumentBatch`.
    """

    ids: np.ndarray
    offsets: np.ndarray
    rows: pa.RecordBatch
    inputs: np.ndarray
    digests: bytes
    text_bytes: int
    special_hits: int
    unknown: np.ndarray
    by_reference: int
    dropped: tuple[Drop, ...]
    skipped: Mapping[tuple[int, str], int]
    replaced: Mapping[int, int]
    rows_in: int

    @property
    def lost(self) -> int:
        """Records that are no documents, for whatever reason."""
        return len(self.dropped) + sum(self.skipped.values())
