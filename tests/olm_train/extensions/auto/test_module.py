"""The train module and the loader that a model and its data get, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.auto_runs import SHAPE, loader, tied, trainer
from support.own_data import Images, Own, Stream
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import olm_train
from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.extensions.any_model.torch_loader import TorchDataLoader
from olm_train.extensions.any_model.train_module import BasicTrainModule
from olm_train.extensions.any_model.wrapping import units
from olm_train.extensions.auto.loader import RowLength, dealt, loader_of, micro_batches
from olm_train.extensions.auto.module import (
    KNOWN,
    UNIT,
    NextTokenModule,
    need_of_any,
    next_token_loss,
    unit_size,
)
from olm_train.extensions.auto.strategy import DeviceConfig
from olm_train.parallel.config import DataParallelConfig, DataParallelType
from olm_train.train_module import TransformerTrainModule


def test_the_loss_is_the_mean_over_labels_whatever_the_model_returns() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 2:] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(next_token_loss(logits, labels), expected)
    torch.testing.assert_close(next_token_loss(SimpleNamespace(logits=logits), labels), expected)
    assert next_token_loss(logits, torch.full_like(labels, -100)) == 0.0


def test_the_cut_of_a_batch_with_uneven_labels_does_not_change_the_step() -> None:
    ids = torch.randint(0, 64, (4, 6))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(4, 6) < 0.5, -100)
    labels[3] = -100
    results = []
    for batches in ([(ids, labels)], [(ids[:3], labels[:3]), (ids[3:], labels[3:])]):
        module = NextTokenModule(tied(dropout=False), torch.optim.SGD, next_token_loss)
        results.append(module.train_step(batches, 1, 1))
    for name, value in results[0].items():
        torch.testing.assert_close(torch.as_tensor(results[1][name]), torch.as_tensor(value))
    assert results[0]["train/labels"] == (labels != -100).sum()


def test_each_model_gets_the_module_that_is_made_for_it(tmp_path: Path) -> None:
    assert type(trainer(tmp_path).train_module) is TransformerTrainModule
    assert type(trainer(tmp_path, "tied").train_module) is NextTokenModule
    images: DataLoader[Any] = DataLoader(Images(), batch_size=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    run = olm_train.AutoTrainer(
        model, torch.optim.SGD, images, loss=nn.CrossEntropyLoss(), save_folder=tmp_path
    )
    assert type(run.train_module) is BasicTrainModule
    assert run.train_module.model is model
    assert len(run.train(epochs=2)) == 12


def test_memory_efficient_recomputes_blocks_and_cuts_the_loss(tmp_path: Path) -> None:
    module = trainer(tmp_path, preset="memory_efficient").train_module
    assert isinstance(module, TransformerTrainModule)
    assert (module.config.ac_config.mode, module.loss.name) == ("full", "chunked")
    plain = trainer(tmp_path).train_module
    assert isinstance(plain, TransformerTrainModule)
    assert (plain.config.ac_config.mode, plain.loss.name) == ("none", "plain")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"loss": nn.CrossEntropyLoss()}, "loss has no effect with a Decoder"),
        ({"min_num_params": 9}, "min_num_params has no effect with a Decoder"),
        ({"context_length": None}, "how long the rows are is not known"),
        (
            {"optimizer": torch.optim.Rprop, "weight_decay": 0.1},
            "torch.optim.Rprop does not take these options",
        ),
    ],
)
def test_what_a_decoder_or_its_optimiser_has_no_use_for_is_refused(
    options: Any, what: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=what):
        trainer(tmp_path, **options)


def test_a_decoder_and_a_lock_must_fit(tiny_mixture: Path, tmp_path: Path) -> None:
    def run(shape: olm_train.DecoderConfig, **options: Any) -> None:
        lock = olm_train.DataLoader(tiny_mixture, global_batch_size=256, rank_microbatch_size=64)
        model = olm_train.Decoder(shape)
        olm_train.AutoTrainer(model, torch.optim.AdamW, lock, save_folder=tmp_path, **options)

    large = replace(SHAPE, vocab_size=512)
    with pytest.raises(UsageError, match="of the model has 64 ids, that of the mixture lock 512"):
        run(SHAPE)
    with pytest.raises(UsageError, match="context_length is 64; the rows of the mixture lock are"):
        run(large, context_length=64)
    with pytest.raises(UsageError, match="the model has 16 positions; a row has 32 tokens"):
        run(large.changed(positions={"name": "learned", "max_positions": 16}))


def test_a_loader_that_gives_no_rows_of_tokens_says_what_it_gives(tmp_path: Path) -> None:
    images: DataLoader[Any] = DataLoader(Images(), batch_size=4)
    with pytest.raises(UsageError, match=r"gave \(float32 \[4, 1, 4, 4\], int64 \[4\]\)"):
        trainer(tmp_path, dataloader=images).train(max_steps=1)
    assert loader().batch_size == 8


@pytest.mark.parametrize(
    "batch", [torch.arange(12).reshape(2, 6), ["a"], None, 5, [], {"input": torch.arange(6)[None]}]
)
def test_batches_without_next_tokens_are_refused(batch: Any) -> None:
    model = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 12))
    module = NextTokenModule(model, torch.optim.SGD, next_token_loss, optim={"lr": 0.1})
    with pytest.raises(UsageError, match="labels"):
        module.train_step([batch], 1, 1)


def test_of_any_model_weights_gradients_and_two_moments_are_counted() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].requires_grad_(False)
    inner = units(model, (nn.Linear,))

    def config(name: str = "fsdp", **options: Any) -> DataParallelConfig:
        return DataParallelConfig(name=DataParallelType(name), **options)

    def need(ranks: int, how: DataParallelConfig, micro: int = 1) -> float:
        devices = DeviceConfig(memory=10**9, world_size=ranks)
        return need_of_any(model, inner, devices, micro_batches=micro)(how) * KNOWN

    assert need(1, config("ddp")) == need(2, config("ddp")) == 800 + 400 + 800
    assert need(4, config(reshard_after_forward=False)) == 500 + 800
    assert need(4, config()) == 500 + 2 * 400
    assert need(4, config(), micro=2) == 400 + 400 + 2 * 400  # gradients whole
    assert need(4, config(cpu_offload=True)) == 100 + 2 * 400
    assert need(4, config("hsdp", num_replicas=2)) == 1000 + 2 * 400


def test_models_are_cut_into_some_dozens_of_units() -> None:
    assert unit_size(tied()) == sum(p.numel() for p in tied().parameters()) // 32
    assert unit_size(nn.Linear(1, 1)) == 1
    assert unit_size(nn.Linear(10**5, 10**5, device="meta")) == UNIT


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
