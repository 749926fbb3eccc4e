"""Arguments of a call that are not what its annotations say."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from support.auto_runs import LENGTH, decoder, loader
from torch import nn

from olm_data.errors import UsageError
from olm_train import AutoTrainer, Callback, TrainerStrategy

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
