"""Documents between the stages of a task: with digests of their texts, then as ids and rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import numbers
from olm_data.dataset.docs import docs_schema
from olm_data.encoders import Encoded
from olm_data.sources.base import DocumentBatch

LONG_TOKENS = 256
"""Documents longer than this on average are copied one by one, which is faster then."""


HashedBatch = tuple[DocumentBatch, bytes]
"""Documents and the digests of their texts, 16 bytes each, see `document_digests`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedBatch:
    """Documents as token ids, without their text.

    Attributes:
        read: the documents, and the records that are none; its `data` is empty.
        encoded: the documents' ids, no BOS, no EOS.
        rows: their rows of `docs.parquet`; None without documents.
        digests: as in `HashedBatch`.
        text_bytes: bytes of all texts.
    """

    read: DocumentBatch
    encoded: Encoded
    rows: pa.RecordBatch
    digests: bytes
    text_bytes: int

    @property
    def lost(self) -> int:
        """Records that are no documents, for whatever reason."""
        return len(self.read.dropped) + sum(self.read.skipped.values())


def delimit(
    ids: np.ndarray, offsets: np.ndarray, chosen: np.ndarray, *, bos: int | None, eos: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Take the chosen documents and put BOS before and EOS after each.

    Args:
        ids: uint32 [t], bodies end to end.
        offsets: int64 [d + 1] into `ids`.
        chosen: bool [d].
        bos, eos: ids to put, or None.

    Returns:
        ids uint32 [t'] and offsets int64 [chosen + 1].
    """
    lengths = np.diff(offsets)
    if not chosen.all():
        ids = ids[np.repeat(chosen, lengths)]
        lengths = lengths[chosen]
    extra = (bos is not None) + (eos is not None)
    ends = np.cumsum(lengths + extra)
    placed = np.concatenate([np.zeros(1, np.int64), ends])
    if extra == 0:
        return ids, placed
    out = np.empty(int(placed[-1]), np.uint32)
    if len(ids) > LONG_TOKENS * len(lengths):  # few documents: one copy each, and no mask
        starts = np.cumsum(lengths) - lengths
        for start, length, at in zip(
            starts.tolist(), lengths.tolist(), placed[:-1].tolist(), strict=True
        ):
            if bos is not None:
                out[at] = bos
                at += 1
            out[at : at + length] = ids[start : start + length]
            if eos is not None:
                out[at + length] = eos
        return out, placed
    body = np.ones(len(out), bool)
    for mark, positions in ((bos, placed[:-1]), (eos, ends - 1)):
        if mark is not None:
            out[positions] = mark
            body[positions] = False
    out[body] = ids
    return out, placed


def document_rows(
    batch: DocumentBatch, hashes: np.ndarray, keep: pa.Schema | None
) -> pa.RecordBatch:
    """Return a batch's rows of `docs.parquet`: the five columns of the format, then kept ones."""
    ids = batch.ids if batch.ids is not None else pa.nulls(batch.documents, pa.string())
    columns = [
        ids.cast(pa.string()),
        numbers(batch.inputs, pa.int32()),
        numbers(batch.positions, pa.int64()),
        numbers(batch.text_bytes, pa.int64()),
        numbers(hashes, pa.uint64()),
    ]
    if keep is not None:
        assert batch.keep is not None
        columns += batch.keep.columns
    return pa.RecordBatch.from_arrays(columns, schema=docs_schema(keep))
