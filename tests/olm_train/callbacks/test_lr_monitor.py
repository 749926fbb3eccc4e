"""Rates of groups are in the log where groups differ, those of any optimiser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.own_data import Own
from support.runs import build_trainer, metrics

from olm_train.duration import Duration
from olm_train.extensions.any_model.train_module import BasicTrainModule
from olm_train.trainer import Trainer

SLOW = (
    "--train_module.optim.group_overrides=[{params: [norm.weight], opts: {lr: 1e-4}}]",
    "--trainer.callbacks.checkpointer.enabled=false",
)
OFF = "--trainer.callbacks.lr_monitor.enabled=false"


def rates(folder: Path) -> list[dict[str, float]]:
    found = metrics(folder)
    return [{n: v for n, v in line.items() if n.startswith("optim/lr")} for line in found]


def test_groups_with_rates_of_their_own_log_them(tiny_mixture: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path / "a", *SLOW, stop=5, quiet=True)
    peaks = [group["peak_lr"] for group in trainer.train_module.optimizer.param_groups]
    assert sorted({1e-4, 1e-2}) == sorted(set(peaks))
    trainer.fit()
    for line in rates(tmp_path / "a"):
        factor = line.pop("optim/lr") / 1e-2
        assert line == {
            f"optim/lr (group {n})": pytest.approx(peak * factor) for n, peak in enumerate(peaks)
        }
    build_trainer(tiny_mixture, tmp_path / "b", *SLOW, OFF, stop=5, quiet=True).fit()
    assert {name for line in rates(tmp_path / "b") for name in line} == {"optim/lr"}


def test_groups_of_one_rate_log_it_once(tiny_mixture: Path, tmp_path: Path) -> None:
    build_trainer(tiny_mixture, tmp_path, *SLOW[1:], stop=5, quiet=True).fit()
    assert {name for line in rates(tmp_path) for name in line} == {"optim/lr"}


def test_an_optimiser_of_ones_own_is_watched_too(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    groups = [{"params": [model[1].weight]}, {"params": [model[1].bias], "lr": 0.5}]
    module = BasicTrainModule(
        model, torch.optim.SGD(groups, lr=0.1), torch.nn.functional.cross_entropy
    )
    Trainer(
        train_module=module, data_loader=Own(), save_folder=tmp_path, max_duration=Duration.steps(2)
    ).fit()
    for line in rates(tmp_path):
        assert (line["optim/lr (group 0)"], line["optim/lr (group 1)"]) == (0.1, 0.5)
