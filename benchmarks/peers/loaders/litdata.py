"""litdata's StreamingDataset with its TokensLoader, in its own DataLoader, no workers.

The chunks hold whole rows of S + 1 ids, so a block of the loader is a row; its user makes int64 ids
and labels of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from peers.loaders.base import Loader, Pass, Task, serve

CHUNK_BYTES = 64 << 20

LOADERS = [
    Loader(
        name="litdata",
        module="litdata",
        package="litdata",
        environment="loader-litdata",
        installs=(("torch==2.13.0",), ("litdata", "torch==2.13.0")),
        gives="ids, labels",
    )
]


def row(number: int, task: Task) -> np.ndarray:
    """Return one row of the stream with the token that follows it."""
    first = number * task.sequence_length
    return np.array(task.stream[first : first + task.sequence_length + 1])


def make(task: Task) -> Pass:
    """Write the chunks and open them."""
    import torch
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    torch.set_num_threads(1)
    block, place = task.sequence_length + 1, f"{task.scratch}/chunks"
    optimize(
        fn=partial(row, task=task),
        inputs=list(range(task.rows)),
        output_dir=place,
        num_workers=1,
        chunk_bytes=CHUNK_BYTES,
        item_loader=TokensLoader(block_size=block),
    )

    class Rows(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = torch.from_numpy(super().__getitem__(index).astype(np.int64))
            return tokens[:-1], tokens[1:]

    dataset = Rows(place, item_loader=TokensLoader(block_size=block), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=task.batch)
    return Pass(batches=lambda: iter(loader), ids=lambda batch: batch[0])


if __name__ == "__main__":
    serve(make)
