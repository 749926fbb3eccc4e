"""What options come to, which contradict each other, and which are not what they should be."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.auto_runs import LENGTH, decoder, loader
from support.own_data import Own
from torch import nn

from olm_data.errors import UsageError
from olm_train import AutoTrainer, Callback, TrainerStrategy
from olm_train.callbacks.early_stopping import EarlyStoppingCallback
from olm_train.extensions.any_model.torch_loader import TorchDataLoader
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
