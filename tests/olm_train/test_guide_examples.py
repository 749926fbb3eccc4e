"""Examples of OLMo-core's callbacks reference and guides, as they are written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_data import Own
from support.runs import build_trainer, metrics
from torch import Tensor, nn

from olm_train import Callback, Duration, Trainer, TrainModule, World
from olm_train.callbacks.console_logger import ConsoleLoggerCallback


@dataclass(kw_only=True)
class StepLogger(Callback):
    """The example of the training guide: `on_step_end(trainer, step, loss)`."""

    every: int = 500

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % self.every == 0:
            self.trainer.say(f"step {step}: loss={metrics['train/CE loss']:.4f}")


def test_a_callback_that_prints_every_so_many_steps(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, quiet=True, stop=5)
    trainer.add_callback("step_logger", StepLogger(every=2))
    trainer.fit()
    losses = {line["step"]: line["train/CE loss"] for line in metrics(tmp_path)}
    said = [line for line in capsys.readouterr().err.splitlines() if ": loss=" in line]
    assert said == [f"step {step}: loss={losses[step]:.4f}" for step in (2, 4)]


class Rename(Callback):
    """Adds, changes and removes metrics in place, as `pre_log_metrics` may."""

    priority = 5

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        metrics["mine/loss"] = metrics["train/CE loss"] * 2
        metrics["optim/lr"] = 0.25
        del metrics["train/labels"]


class Later(Rename):
    """Runs after the first one: its priority is lower."""

    priority = -5

    def pre_log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        metrics["mine/loss"] += 1


def test_pre_log_metrics_updates_metrics_in_place_by_priority(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, quiet=True, stop=3)
    trainer.add_callback("later", Later())
    trainer.add_callback("rename", Rename())
    trainer.fit()
    for line in metrics(tmp_path):
        assert line["mine/loss"] == line["train/CE loss"] * 2 + 1
        assert line["optim/lr"] == 0.25
        assert "train/labels" not in line


class FirstHalf(Callback):
    """Changes the batches of a step: half of the micro-batches, twice."""

    def change_batches(self, batches: Sequence[Any]) -> Sequence[Any]:
        half = len(batches) // 2
        return [*batches[:half], *batches[:half]]


def test_change_batches_is_what_a_step_trains_on(tiny_mixture: Path, tmp_path: Path) -> None:
    losses = []
    for name in ("with", "without"):
        trainer = build_trainer(tiny_mixture, tmp_path / name, quiet=True, stop=2)
        if name == "with":
            trainer.add_callback("first_half", FirstHalf())
        trainer.fit()
        losses.append([line["train/CE loss"] for line in metrics(tmp_path / name)])
    assert losses[0][0] != losses[1][0]


class Classifier(TrainModule):
    """A train module from nothing but the protocol: model, optimiser, step, evaluation, state."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.world = World()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        self.optimizer = torch.optim.NAdam(self.model.parameters(), lr=0.05)

    def train_step(
        self, batches: Sequence[Any], step: int, max_steps: int, **_: Any
    ) -> Mapping[str, Tensor | float]:
        self.model.zero_grad()
        losses = [nn.functional.cross_entropy(self.model(x), y) for x, y in batches]
        loss = torch.stack(losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        self.optimizer.step()
        return {"train/CE loss": loss, "optim/total grad norm": norm, "optim/lr": 0.05}

    def eval_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y, reduction="sum"), torch.tensor(len(y))

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


@pytest.mark.parametrize("length", [3, None])
def test_a_module_and_a_loader_of_ones_own_of_known_and_unknown_length(
    tmp_path: Path, length: int | None
) -> None:
    trainer = Trainer(
        train_module=Classifier(),
        data_loader=Own(length, ends=0 if length else 9),
        save_folder=tmp_path,
        max_duration=Duration.steps(12),
        callbacks={"console_logger": ConsoleLoggerCallback(log_interval=1)},
    )
    assert {"garbage_collector", "metrics_logger", "speed_monitor"} <= trainer.callbacks.keys()
    trainer.fit()
    losses = [line["train/CE loss"] for line in metrics(tmp_path)]
    assert len(losses) == (12 if length else 9)
    assert losses[-1] < losses[0]
