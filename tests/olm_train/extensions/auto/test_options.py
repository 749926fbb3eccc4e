"""What options come to, and which contradict each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.auto_runs import loader
from support.own_data import Own
from torch import nn

from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback
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
