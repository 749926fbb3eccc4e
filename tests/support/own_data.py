"""Data sets and loaders of one's own, with random numbers of every kind in their instances."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from olm_train.data.base import DataLoaderBase

SIZE, CLASSES = 21, 3


def image(number: int) -> tuple[Tensor, Tensor]:
    """Image [1, 4, 4] and class number `number`, and noise from all three global generators."""
    label = number % CLASSES
    pixels = torch.linspace(-1, 1, 16).roll(5 * label).reshape(1, 4, 4) + number / 100
    noise = torch.rand(()).item() + random.random() + float(np.random.rand())  # noqa: NPY002
    return pixels + noise / 10, torch.tensor(label)


class Images(Dataset[tuple[Tensor, Tensor]]):
    """A small set of images that are classified."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return image(number)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same without a length; `stateful` ones know where they are."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < self.size:
            self.at += 1
            yield image(self.at - 1)
        self.at = 0


class StatefulStream(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Own(DataLoaderBase):
    """The least there is: two micro-batches of four images a step, `length` steps an epoch."""

    def __init__(self, length: int | None = 3, *, rank: int = 0, size: int = 1, ends: int = 0):
        self.length, self.rank, self.size, self.ends = length, rank, size, ends
        self.global_batch_size = 8 * size

    @property
    def steps(self) -> int | None:
        return self.length

    def __iter__(self) -> Iterator[list[Any]]:
        while not self.ends or self.step < self.ends:
            torch.manual_seed(self.step)
            random.seed(self.step)
            np.random.seed(self.step)  # noqa: NPY002
            images = [image(self.step * 8 * self.size + self.rank * 8 + n) for n in range(8)]
            self.step += 1
            self.epoch = 1 + (self.step - 1) // (self.length or 4)
            parts = images[:4], images[4:]
            yield [
                (torch.stack([x for x, _ in part]), torch.stack([y for _, y in part]))
                for part in parts
            ]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.rank
        self.step, self.epoch = state["step"], state["epoch"]
