"""What the arguments of `AutoTrainer` come to, which strategy is chosen, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.auto_runs import LENGTH, SHAPE, decoder, loader, tied, trainer
from support.own_data import Images, Own, Stream
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import olm_train
from olm_data.errors import UsageError
from olm_train import AutoTrainer, Callback
from olm_train.callbacks.early_stopping import EarlyStoppingCallback
from olm_train.distributed.world import World
from olm_train.estimate.sharding import ROOM
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
from olm_train.extensions.auto.strategy import (
    GOALS,
    Choice,
    DeviceConfig,
    Preset,
    TrainerStrategy,
    choose_strategy,
)
from olm_train.extensions.auto.trainer import (
    callbacks_by_name,
    device_of,
    optimizer_options,
    peak_rate,
    schedule_of,
    snake_case,
    steps_of,
)
from olm_train.extensions.notices.notifier import NotifierCallback
from olm_train.optim.schedule import Constant, Linear
from olm_train.parallel.config import DataParallelConfig, DataParallelType
from olm_train.parallel.mesh import Mesh
from olm_train.train_module import TransformerTrainModule

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


def instance() -> torch.optim.Optimizer:
    return SGD(nn.Linear(2, 2).parameters(), lr=0.3)


def test_options_of_a_class_and_of_an_instance() -> None:
    assert optimizer_options(AdamW, None, None, None) == {"lr": 3e-4}
    given = optimizer_options(AdamW, 1e-3, 0.1, {"betas": (0.9, 0.95)})
    assert given == {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    assert optimizer_options(instance(), None, None, None) == {}
    assert peak_rate(AdamW, given) == 1e-3
    assert peak_rate(instance(), {}) == 0.3


@pytest.mark.parametrize(
    ("optimizer", "arguments", "what"),
    [
        (instance(), (1e-3, None, None), "are for an optimiser given as a class"),
        (instance(), (None, None, {"nesterov": True}), "are for an optimiser given as a class"),
        (AdamW, (1e-3, None, {"lr": 1e-2}), "lr in optim is given as an argument, too"),
    ],
)
def test_options_that_have_no_effect_are_refused(optimizer: Any, arguments: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        optimizer_options(optimizer, *arguments)


def test_the_default_schedule_warms_up_over_a_tenth_and_ends_at_a_tenth() -> None:
    schedule = schedule_of(None, 1e-3)
    assert [schedule.lr_factor(at, 100) for at in (5, 10, 100)] == pytest.approx([0.5, 1.0, 0.1])
    own = schedule_of(None, 1e-3, warmup_steps=20, min_lr=1e-5)
    assert [own.lr_factor(at, 100) for at in (10, 20, 100)] == pytest.approx([0.5, 1.0, 0.01])
    assert schedule_of(None, 1e-3, use_warmup_cosine=False) == Constant()
    assert schedule_of(Linear(), 1e-3) == Linear()


@pytest.mark.parametrize(
    ("scheduler", "options", "what"),
    [
        (Linear(), {"warmup_steps": 3}, "warmup_steps has no effect with scheduler"),
        (None, {"min_lr": 0.0, "use_warmup_cosine": False}, "min_lr has no effect with use_warmup"),
        (None, {"min_lr": 1.0}, "min_lr 1 is above the peak rate 0.001"),
    ],
)
def test_schedules_that_contradict_are_refused(scheduler: Any, options: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        schedule_of(scheduler, 1e-3, **options)


def test_devices_that_are_not_here_are_refused() -> None:
    assert device_of("auto") is None
    assert device_of("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        device_of("gpu")
    with pytest.raises(UsageError, match="no device mps to train on here"):
        device_of("mps")


def test_the_sooner_of_epochs_and_steps_ends_the_training() -> None:
    data = TorchDataLoader(loader())  # six steps
    assert steps_of(data, None, None, None) == (6, 6)
    assert steps_of(data, 2, None, None) == (12, 12)
    assert steps_of(data, None, 9, None) == (9, 9)
    assert steps_of(data, 1, 9, None) == (6, 6)
    assert steps_of(data, 2, 9, 100) == (100, 9)
    stream = Own(None)
    assert steps_of(stream, 1, 9, None) == (9, 9)
    assert steps_of(stream, 1, None, 20) == (20, 20)
    with pytest.raises(UsageError, match="how many steps 2 epochs of this data are"):
        steps_of(stream, 2, None, None)
    with pytest.raises(UsageError, match="total_steps 5 is less than the 6 steps to train"):
        steps_of(data, 1, None, 5)


@dataclass(kw_only=True)
class StepLogger(Callback):
    pass


def test_callbacks_of_a_list_have_the_names_of_train_yaml() -> None:
    stopping, own = EarlyStoppingCallback(), StepLogger()
    found = callbacks_by_name([stopping, own, NotifierCallback(webhook_url="https://127.0.0.1/x")])
    assert [*found] == ["early_stopping", "step_logger", "notifier"]
    assert callbacks_by_name({"mine": own}) == {"mine": own}
    with pytest.raises(UsageError, match="two callbacks are called 'step_logger'"):
        callbacks_by_name([own, StepLogger()])
    assert [snake_case(name) for name in ("GPUMemory", "MyCallback2", "A")] == [
        "gpu_memory",
        "my_callback2",
        "a",
    ]


OTHERS = {"self", "dataloader", "device"}  # these have checks of their own


ARGUMENTS = sorted(inspect.signature(AutoTrainer.__init__).parameters.keys() - OTHERS)


def auto(**given: Any) -> AutoTrainer:
    plain = {"model": decoder(), "optimizer": torch.optim.AdamW, "dataloader": loader()}
    return AutoTrainer(**{**plain, "device": "cpu", "context_length": LENGTH, **given})


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_each_argument_of_another_type_is_refused_by_name(argument: str) -> None:
    with pytest.raises(UsageError, match=argument):
        auto(**{argument: object()})


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "adamw"},
        {"learning_rate": "3e-4"},
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"grad_accum_steps": 0},
        {"grad_accum_steps": 1.5},
        {"context_length": "32"},
        {"context_length": 0},
        {"seed": -1},
        {"total_steps": "9"},
        {"warmup_steps": -1},
        {"min_lr": -1.0},
        {"grad_clip_norm": 0.0},
        {"use_amp": "no"},
        {"save_folder": ""},
        {"callbacks": [Callback]},
        {"checkpointer": {"save_interval": 5}},
        {"loss": nn.CrossEntropyLoss},
        {"scheduler": "cosine"},
        {"dp_config": "fsdp"},
        {"preset": 3},
        {"preset": "fast"},
        {"force_strategy": "dpp"},
    ],
)
def test_values_that_cannot_be_meant_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        auto(**given)


@pytest.mark.parametrize("given", [[1, 2], None, 3])
def test_what_is_no_data_loader_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="is no data loader"):
        auto(dataloader=given)


@pytest.mark.parametrize(
    "given", [{"epochs": "2"}, {"epochs": 1.5}, {"max_steps": True}, {"max_steps": 0}]
)
def test_lengths_of_another_type_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    run = auto(save_folder=tmp_path, min_lr=0, weight_decay=0)
    with pytest.raises(UsageError, match=next(iter(given))):
        run.train(**given)


@pytest.mark.parametrize("given", [TrainerStrategy.SINGLE, "single", "SINGLE"])
def test_a_strategy_is_a_member_its_value_or_its_name(given: Any, tmp_path: Path) -> None:
    assert auto(force_strategy=given, save_folder=tmp_path).strategy is TrainerStrategy.SINGLE


GB = 10**9


def need_of(whole: int, devices: DeviceConfig) -> Callable[[DataParallelConfig], int]:
    """Bytes of a model of `whole` bytes: cut, and gathered again if it is kept."""

    def need(config: DataParallelConfig) -> int:
        if devices.world_size == 1:
            return whole
        shards = config.mesh(devices.world_size, devices.nodes).dp_shard
        kept = whole // 4 if shards > 1 and config.reshard_after_forward is False else 0
        return 1 if config.cpu_offload else whole // shards + kept

    return need


def devices_of(ranks: int, nodes: int = 1, memory: int = 80 * GB, **options: Any) -> DeviceConfig:
    return DeviceConfig(
        **{"device": "cuda", "name": "H100", "gpus": 8, **options},
        memory=memory,
        world_size=ranks,
        nodes=nodes,
    )


def chosen(whole: int, devices: DeviceConfig, **options: Any) -> Choice:
    return choose_strategy(devices, need_of(whole, devices), **options)


@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 2000),
    st.sampled_from(list(GOALS)),
    st.none() | st.sampled_from(list(TrainerStrategy)),
)
def test_the_choice_fits_the_ranks_and_says_why(
    nodes: int,
    per_node: int,
    device: str,
    gigabytes: int,
    preset: Preset,
    force: TrainerStrategy | None,
) -> None:
    ranks = nodes * per_node
    devices = devices_of(ranks, nodes, device=device)
    divided = any(ranks % n == 0 for n in range(2, ranks))
    if force is not None and (
        (force == "single") != (ranks == 1) or (force == "hsdp" and not divided)
    ):
        with pytest.raises(UsageError) as error:
            chosen(gigabytes * GB, devices, preset=preset, force=force)
        assert (error.value.where, bool(error.value.fix)) == ("force_strategy", True)
        return
    choice = chosen(gigabytes * GB, devices, preset=preset, force=force)
    text = "\n".join(choice.why)
    assert choice == chosen(gigabytes * GB, devices, preset=preset, force=force)
    assert force in (None, choice.strategy)
    assert (choice.strategy == "single") == (ranks == 1)
    assert text.count("<- chosen") == 1
    assert text.startswith(f"AutoTrainer: {choice.strategy}: ")
    assert (f"chosen for {preset}" if force is None else "is forced") in text
    needs = need_of(gigabytes * GB, devices)
    fits = needs(choice.dp_config) <= round(ROOM[GOALS[preset]] * devices.memory)
    assert fits != ("warning: " in text)
    if ranks > 1:
        choice.dp_config.mesh(ranks, nodes)
        assert choice.strategy == choice.dp_config.name
        assert not (device == "cpu" and choice.dp_config.cpu_offload)
    if force is None and ranks > 1 and preset != "memory_efficient":
        whole = needs(DataParallelConfig(name=DataParallelType.ddp))
        ddp_fits = whole <= round(ROOM[GOALS[preset]] * devices.memory)
        assert ddp_fits == (choice.strategy == "ddp")


@pytest.mark.parametrize(
    ("gigabytes", "ranks", "nodes", "preset", "strategy"),
    [
        (10, 1, 1, "balanced", "single"),
        (10, 8, 1, "balanced", "ddp"),
        (10, 8, 1, "memory_efficient", "fsdp"),
        (65, 8, 1, "balanced", "fsdp"),
        (65, 8, 1, "speed", "ddp"),
        (300, 8, 1, "speed", "fsdp"),
        (300, 16, 2, "balanced", "hsdp"),
        (300, 16, 2, "memory_efficient", "fsdp"),
        (800, 16, 2, "balanced", "fsdp"),
    ],
)
def test_the_guides_table_of_scenarios(
    gigabytes: int, ranks: int, nodes: int, preset: Preset, strategy: str
) -> None:
    choice = chosen(gigabytes * GB, devices_of(ranks, nodes), preset=preset)
    assert choice.strategy == strategy


def test_one_rank_is_told_of_the_other_gpus_and_of_what_does_not_fit() -> None:
    roomy = "\n".join(chosen(10 * GB, devices_of(1)).why)
    assert "1 of 8 GPUs is used; all: torchrun --nproc-per-node=8 script.py" in roomy
    tight = "\n".join(chosen(300 * GB, devices_of(1, gpus=1)).why)
    assert "nothing fits by this estimate" in tight
    assert "GPUs is used" not in tight


@pytest.mark.parametrize(
    ("force", "ranks"), [("fsdp", 1), ("ddp", 1), ("single", 2), ("hsdp", 2), ("hsdp", 7)]
)
def test_what_the_ranks_do_not_fit_is_refused(force: str, ranks: int) -> None:
    with pytest.raises(UsageError, match=f"force_strategy {force} does not fit {ranks} rank") as at:
        chosen(GB, devices_of(ranks), force=TrainerStrategy(force))
    assert "torchrun --nproc-per-node=8 script.py" in (at.value.fix or "")


def test_hsdp_on_one_machine_has_two_copies() -> None:
    choice = chosen(10 * GB, devices_of(4), force=TrainerStrategy.MULTI_GPU_HSDP)
    assert choice.dp_config.mesh(4) == Mesh(dp_replicate=2, dp_shard=2)


def test_given_options_are_taken_and_must_agree_with_what_is_forced() -> None:
    devices, config = devices_of(8), DataParallelConfig(reshard_after_forward=False)
    choice = chosen(80 * GB, devices, given=config, fixed=True)
    assert (choice.strategy, choice.dp_config) == ("fsdp", config)
    text = "\n".join(choice.why)
    assert text.startswith("AutoTrainer: fsdp: dp_config is given: H100, 8 ranks on 1 machine")
    assert "30 GB  <- chosen" in text
    with pytest.raises(UsageError, match="force_strategy ddp does not fit dp_config"):
        chosen(GB, devices, given=config, fixed=True, force=TrainerStrategy.MULTI_GPU_DDP)


def test_what_is_found_here() -> None:
    found = DeviceConfig.here(World())
    assert (found.device, found.name, found.world_size, found.nodes) == ("cpu", "CPU", 1, 1)
    assert found.memory > GB
    with pytest.raises(UsageError, match="memory"):
        DeviceConfig(memory=0)


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
