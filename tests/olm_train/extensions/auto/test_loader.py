"""Any loader becomes that of the run: dealt to the ranks, or refused where it is another rank's."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.own_data import Own, Stream
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import olm_train
from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.extensions.any_model.torch_loader import TorchDataLoader
from olm_train.extensions.auto.loader import RowLength, dealt, loader_of, micro_batches


def world(rank: int, size: int) -> World:
    return World(rank=rank, size=size)


def plain(count: int = 12, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), **{"batch_size": 2, **options})


def seen(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_ranks_see_each_instance_once_and_together_the_batches_of_one(
    ranks: int, size: int, steps: int, shuffle: bool
) -> None:
    count = ranks * size * steps
    shares = [
        seen(dealt(plain(count, batch_size=size, shuffle=shuffle), world(rank, ranks), 3))
        for rank in range(ranks)
    ]
    together = [sorted(chain(*parts)) for parts in zip(*shares, strict=True)]
    assert sorted(chain(*together)) == list(range(count))
    if not shuffle:  # step by step what one rank with batches of them all sees
        assert together == seen(plain(count, batch_size=size * ranks))


def test_options_of_a_loader_are_kept() -> None:
    def collate(parts: list[Any]) -> list[Any]:
        return [torch.stack([part[0] for part in parts]) * 10]

    own = plain(5, collate_fn=collate, drop_last=True, num_workers=1, prefetch_factor=3)
    share = dealt(own, world(1, 2), 0)
    assert (share.num_workers, share.prefetch_factor, share.drop_last) == (1, 3, True)
    assert share.collate_fn is collate
    assert seen(dealt(plain(5, collate_fn=collate, drop_last=True), world(1, 2), 0)) == [[10, 30]]


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * 12, 12)},
        {"sampler": RandomSampler(range(12), replacement=True)},
        {"sampler": RandomSampler(range(12), generator=torch.Generator())},
        {"sampler": RandomSampler(range(12), num_samples=5)},
    ],
)
def test_a_loader_with_a_sampler_of_its_own_is_left_alone(options: Any) -> None:
    for own in (plain(**options), DataLoader(Stream())):
        assert dealt(own, world(0, 2), 0) is own


def test_accumulation_is_of_plain_loaders_alone(tiny_mixture: Path) -> None:
    assert micro_batches(loader_of(plain(), World(), accumulate=3)) == 3
    assert micro_batches(loader_of(plain(), World())) == 1
    ours = TorchDataLoader(plain(), accumulate=2)
    assert loader_of(ours, World(), accumulate=2) is ours
    with pytest.raises(UsageError, match="is 3; the data loader gives 2 micro-batches a step"):
        loader_of(ours, World(), accumulate=3)
    with pytest.raises(UsageError, match="its own number of micro-batches"):
        loader_of(Own(), World(), accumulate=3)
    lock = olm_train.DataLoader(tiny_mixture, global_batch_size=256, rank_microbatch_size=64)
    assert micro_batches(loader_of(lock, World())) == 4
    assert micro_batches(Own()) is None


def test_a_loader_of_another_rank_is_refused(tiny_mixture: Path) -> None:
    lock = olm_train.DataLoader(tiny_mixture, global_batch_size=256, rank_microbatch_size=64)
    for ours in (lock, TorchDataLoader(plain())):
        with pytest.raises(UsageError, match="for rank 0 of 1; this is rank 1 of 2") as error:
            loader_of(ours, world(1, 2))
        assert "world = World.start()" in (error.value.fix or "")


def test_rows_longer_than_planned_for_are_refused() -> None:
    rows, images = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9)
    check = RowLength(context_length=8)
    for batch in ((rows, rows), {"input_ids": rows, "labels": rows}, rows):
        with pytest.raises(UsageError, match="rows of 9 tokens; context_length is 8"):
            check.pre_step([batch])
    check.pre_step([(rows[:, :8], rows), images, (images, rows[0]), []])
