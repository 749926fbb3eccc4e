"""grain's MapDataset over the memory map: shuffled, cut into ids and labels, batched.

It hands out NumPy arrays. Its reading threads are off: everything happens in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from peers.loaders.base import Loader, Pass, Task, serve

LOADERS = [
    Loader(
        name="grain",
        module="grain",
        package="grain",
        environment="loader-grain",
        installs=(("grain", "numpy"),),
        gives="ids, labels",
    )
]


class Rows:
    """Random access to rows of S + 1 tokens as int64."""

    def __init__(self, task: Task) -> None:
        self._stream, self._length, self._rows = (
            np.asarray(task.stream),
            task.sequence_length,
            task.rows,
        )

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> np.ndarray:
        first = index * self._length
        return self._stream[first : first + self._length + 1].astype(np.int64)


def make(task: Task) -> Pass:
    """Chain the transformations."""
    import grain

    rows = (
        grain.MapDataset.source(Rows(task))
        .shuffle(seed=0)
        .map(lambda tokens: {"ids": tokens[:-1], "labels": tokens[1:]})
        .batch(task.batch)
    )

    def batches() -> Iterator[Any]:
        return iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    return Pass(batches=batches, ids=lambda batch: batch["ids"])


if __name__ == "__main__":
    serve(make)
