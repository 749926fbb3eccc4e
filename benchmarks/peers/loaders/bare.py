"""Yardsticks in this environment: nothing but copying, and what one writes in twenty lines.

gather-direct, gather-buffer: NumPy slices of the memory map into arrays made once, ids and labels
memmap: a torch DataLoader over the memory map, num_workers=0
nanogpt: the method of nanoGPT's get_batch: random offsets, a new memory map each batch
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from peers.loaders.base import Loader, Pass, Task, serve

BOTH = "ids, labels"
LOADERS = [
    Loader(name="gather-direct", module="bare", option="direct", package="numpy", gives=BOTH),
    Loader(name="gather-buffer", module="bare", option="buffer", package="numpy", gives=BOTH),
    Loader(name="torch-memmap", module="bare", option="memmap", package="torch", gives=BOTH),
    Loader(
        name="nanogpt-style",
        module="bare",
        option="nanogpt",
        package="torch",
        same_rows=False,
        gives=f"{BOTH}; random windows, with repeats",
    ),
]


def gather(task: Task) -> Pass:
    """Return passes in a shuffled order, row by row into the same two arrays."""
    length, size, stream = task.sequence_length, task.batch, np.asarray(task.stream)
    firsts = (np.random.default_rng(0).permutation(task.rows) * length).tolist()
    buffer = np.empty((size, length + 1), np.uint16)
    ids, labels = (np.empty((size, length), np.int64) for _ in range(2))

    def direct() -> Iterator[Any]:
        for i in range(0, len(firsts), size):
            for k, first in enumerate(firsts[i : i + size]):
                ids[k] = stream[first : first + length]
                labels[k] = stream[first + 1 : first + length + 1]
            yield ids, labels

    def through_buffer() -> Iterator[Any]:
        for i in range(0, len(firsts), size):
            for k, first in enumerate(firsts[i : i + size]):
                buffer[k] = stream[first : first + length + 1]
            ids[...] = buffer[:, :-1]
            labels[...] = buffer[:, 1:]
            yield ids, labels

    batches = direct if task.option == "direct" else through_buffer
    return Pass(batches=batches, ids=lambda batch: batch[0])


def memmap(task: Task) -> Pass:
    """Return passes of torch's own loader."""
    import torch

    torch.set_num_threads(1)
    length, stream = task.sequence_length, np.asarray(task.stream)

    class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __len__(self) -> int:
            return task.rows

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            window = stream[index * length : (index + 1) * length + 1].astype(np.int64)
            tokens = torch.from_numpy(window)
            return tokens[:-1], tokens[1:]

    loader = torch.utils.data.DataLoader(Rows(), batch_size=task.batch, shuffle=True)
    return Pass(batches=lambda: iter(loader), ids=lambda batch: batch[0])


def nanogpt(task: Task) -> Pass:
    """Return passes of as many random windows as the stream has rows."""
    import torch

    torch.set_num_threads(1)
    length = task.sequence_length

    def window(data: np.ndarray, first: int) -> torch.Tensor:
        return torch.from_numpy(data[first : first + length].astype(np.int64))

    def batches() -> Iterator[Any]:
        for _ in range(task.rows // task.batch):
            data = task.stream  # a new memory map each batch, as there
            firsts = torch.randint(len(data) - length, (task.batch,)).tolist()
            inputs, labels = (torch.stack([window(data, i + by) for i in firsts]) for by in (0, 1))
            yield inputs, labels

    return Pass(batches=batches, ids=lambda batch: batch[0])


def make(task: Task) -> Pass:
    """Return the yardstick that the task names."""
    return {"memmap": memmap, "nanogpt": nanogpt}.get(task.option, gather)(task)


if __name__ == "__main__":
    serve(make)
