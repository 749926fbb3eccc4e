"""`--shuffle-documents`: the documents of a staged shard in a keyed order, before it is published.

    staged tokens, ends, docs + seed -> prp1 permutation of the documents -> the same, permuted

Which document comes where depends on the seed, the shard's name and its number of documents alone.
Tokens are copied in pieces of a fixed size, however long a document is; document rows need memory
in proportion to their number. Never: write through a memory map, or move a document elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from olm_data.dataset.docs import DocsWriter
from olm_data.dataset.docs_file import ROW_GROUP
from olm_data.order.prp import permute, round_keys

PIECE = 1 << 20
"""Tokens moved at a time: 8 bytes of index and at most 4 of id each."""


def document_order(seed: int, name: str, documents: int) -> np.ndarray:
    """Return int64 [documents]: at place i stands the document that was appended as `order[i]`."""
    keys = round_keys(seed, f"documents:{name}", 0)
    return permute(np.arange(documents, dtype=np.int64), documents, keys)


def shuffle_tokens(
    path: Path, header: int, dtype: np.dtype[Any], ends: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Put the tokens of a staged file into a new order of documents.

    Args:
        path: header of `header` bytes, then the tokens; replaced by such a file.
        ends: uint64 [documents], document ends in tokens.
        order: int64 [documents].

    Returns:
        uint64 [documents], the new ends.
    """
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    lengths = np.diff(ends.astype(np.int64), prepend=0)[order]
    new_ends = np.cumsum(lengths)
    moved = starts[order] - (new_ends - lengths)  # how far back each document's tokens come from
    tokens = np.memmap(path, dtype, "r", header)
    fresh = path.with_suffix(".shuffled")
    with open(path, "rb") as old, open(fresh, "wb") as file:
        file.write(old.read(header))
        for low in range(0, len(tokens), PIECE):
            high = min(low + PIECE, len(tokens))
            first = int(np.searchsorted(new_ends, low, side="right"))
            last = int(np.searchsorted(new_ends, high, side="left")) + 1
            here = np.minimum(new_ends[first:last], high)
            counts = np.diff(here, prepend=low)
            source = np.repeat(moved[first:last], counts) + np.arange(low, high)
            file.write(tokens[source].data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    return new_ends.astype(np.uint64)


def shuffle_rows(path: Path, order: np.ndarray) -> None:
    """Put the rows of a staged `docs.parquet` into a new order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from olm_data.arrow_values import numbers

    table = pq.read_table(path, use_threads=False).combine_chunks()
    fresh = path.with_suffix(".shuffled")
    with DocsWriter(fresh, table.schema) as writer:
        for low in range(0, len(order), ROW_GROUP):
            part = table.take(numbers(order[low : low + ROW_GROUP], pa.int64()))
            for rows in part.to_batches():
                writer.append(rows)
    os.replace(fresh, path)
