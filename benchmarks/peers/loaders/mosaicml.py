"""MosaicML's StreamingDataset over MDS shards of whole rows, in a torch DataLoader, no workers.

A sample is one array of S + 1 ids of a fixed shape; its user makes int64 ids and labels of it. The
package imports torchvision for its image datasets, and the registry's torchvision does not load
beside a torch for CPUs only: the name is taken by an empty module, which nothing here touches.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import numpy as np

from peers.loaders.base import Loader, Pass, Task, serve

LOADERS = [
    Loader(
        name="mosaicml",
        module="mosaicml",
        package="mosaicml-streaming",
        environment="loader-mosaicml",
        installs=(("torch==2.13.0",), ("mosaicml-streaming", "torch==2.13.0")),
        gives="ids, labels",
    )
]


class Empty(types.ModuleType):
    """A module that has whatever class is imported from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def without_torchvision() -> None:
    """Let the package be imported without the images of torchvision."""
    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = Empty(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__path__ = []
        sys.modules[module.__name__] = module


def make(task: Task) -> Pass:
    """Write the shards and open them."""
    import torch

    without_torchvision()
    from streaming import MDSWriter, StreamingDataset

    torch.set_num_threads(1)
    length, stream = task.sequence_length, np.asarray(task.stream)
    place = f"{task.scratch}/mds"
    with MDSWriter(out=place, columns={"tokens": f"ndarray:uint16:{length + 1}"}) as writer:
        for row in range(task.rows):
            writer.write({"tokens": stream[row * length : (row + 1) * length + 1]})

    class Rows(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = torch.from_numpy(super().__getitem__(at)["tokens"].astype(np.int64))
            return tokens[:-1], tokens[1:]

    dataset = Rows(local=place, shuffle=True, batch_size=task.batch)
    loader = torch.utils.data.DataLoader(dataset, batch_size=task.batch)
    return Pass(batches=lambda: iter(loader), ids=lambda batch: batch[0])


if __name__ == "__main__":
    serve(make)
