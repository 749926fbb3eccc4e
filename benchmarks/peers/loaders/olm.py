"""Ours, in two ways, each in the caller's thread:

labels: order, document borders, input_ids and labels, as NumPy arrays
fields: `DataLoader` with prefetch=0, every field of a batch as tensors
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from peers.loaders.base import Loader, Pass, Task, serve

AHEAD = 8192  # rows located at once, as `DataLoader` does

LOADERS = [
    Loader(
        name="olm-labels",
        module="olm",
        option="labels",
        package="olm-data",
        gives="ids, labels masked at borders",
    ),
    Loader(
        name="olm-fields",
        module="olm",
        option="fields",
        package="olm-data",
        gives="ids, labels masked at borders, cu_seqlens",
    ),
]


def labels(lock: Path, task: Task) -> Pass:
    """Return passes over ids and labels."""
    from olm_data.rows.reader import RowReader

    reader = RowReader(lock)

    def batches() -> Iterator[Any]:
        for first in range(0, task.rows, AHEAD):
            ahead = reader.prepare(np.arange(first, min(task.rows, first + AHEAD)))
            for i in range(0, len(ahead), task.batch):
                yield ahead.read_tokens(i, i + task.batch)

    return Pass(batches=batches, ids=lambda batch: batch[0])


def fields(lock: Path, task: Task) -> Pass:
    """Return passes over all fields."""
    import torch

    from olm_train.data import DataLoader

    torch.set_num_threads(1)
    size = task.batch * task.sequence_length
    loader = DataLoader(lock, global_batch_size=size, rank_microbatch_size=size, prefetch=0)
    begin = loader.state_dict()

    def batches() -> Iterator[Any]:
        loader.load_state_dict(begin)
        for (batch,) in loader:
            yield batch

    return Pass(batches=batches, ids=lambda batch: batch.input_ids)


def make(task: Task) -> Pass:
    """Open the lock beside the data."""
    lock = next(Path(task.folder).glob("*.lock.json"))
    return {"labels": labels, "fields": fields}[task.option](lock, task)


if __name__ == "__main__":
    serve(make)
