"""Memory for the arrays of batches, recycled as soon as nobody looks at a batch any more.

    Pool.lease -> one block -> BatchMemory: the arrays of a batch -> ... -> last view dies -> Pool

Never: hand out memory that is still referenced, or copy.
"""

from __future__ import annotations

import mmap
import weakref
from functools import partial

import numpy as np
from numpy.typing import NDArray


class Pool:
    """Memory of batches nobody references any more, by size.

    A fresh batch of a few megabytes costs several times its copying in page faults, as the
    allocator returns such blocks to the system. Here a block comes back when the last array (or
    tensor) on it is gone: the arrays hang on one ndarray whose death a weak reference reports.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        self._leases: dict[int, weakref.ref[NDArray[np.uint8]]] = {}  # by the id of the block

    def lease(self, size: int) -> NDArray[np.uint8]:
        """Return uint8 [size] on a page border, to be reused once all views of it are gone."""
        blocks = self._free.setdefault(size, [])
        block = blocks.pop() if blocks else _pages(size)
        array = np.frombuffer(block, dtype=np.uint8, count=size)
        self._leases[id(block)] = weakref.ref(array, partial(_give_back, blocks, block))
        return array


def _give_back(blocks: list[mmap.mmap], block: mmap.mmap, _: object) -> None:
    blocks.append(block)


HUGE = 2 << 20


def _pages(size: int) -> mmap.mmap:
    """Return private memory that starts on a page border: NumPy's own often splits cache lines."""
    whole = -(-size // HUGE) * HUGE  # the kernel gives huge pages for whole ones alone
    block = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


class BatchMemory:
    """The arrays of one batch laid out in one block of a pool."""

    def __init__(self, pool: Pool, rows: int, length: int) -> None:
        size = rows * length
        block = pool.lease(size * 20)
        wide = block[: size * 16].view(np.int64).reshape(2, rows, length)
        self.input_ids, self.labels = wide
        self.positions = block[size * 16 :].view(np.int32).reshape(rows, length)
