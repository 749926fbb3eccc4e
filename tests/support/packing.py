"""Documents to pack, and rows as lists of pieces."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from olm_data.packing.base import PackedRows

LENGTHS = st.lists(st.integers(1, 40), max_size=40)
Row = list[tuple[int, int]]


def documents(lengths: list[int], gap: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of documents with `gap` tokens of others between them."""
    sizes = np.array(lengths, np.int64)
    return np.cumsum(sizes + gap) - sizes, sizes


def rows_of(parts: Iterable[PackedRows]) -> list[Row]:
    rows: list[Row] = []
    for packed in parts:
        pieces = list(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))
        stops = np.cumsum(packed.counts).tolist()
        rows += [pieces[b - n : b] for b, n in zip(stops, packed.counts.tolist(), strict=True)]
    return rows


def inputs(row: Row, sequence_length: int) -> list[int]:
    """The places of the dataset whose tokens are inputs of a row."""
    return [t for start, size in row for t in range(start, start + size)][:sequence_length]


def peak(parts: Iterable[PackedRows]) -> int:
    """The most bytes of memory held while rows are taken and let go."""
    tracemalloc.start()
    for _ in parts:
        pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most
