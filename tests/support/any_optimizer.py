"""Runs of the tiny mixture with any optimiser, and optimisers that keep their state oddly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.runs import build_trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from olm_train.callbacks.base import Callback
from olm_train.trainer import Trainer

Make = Callable[[list[dict[str, Any]]], Optimizer]


def trainer_with(
    make: Make, lock: Path, folder: Path, *overrides: str, world: Any = None, **callbacks: Callback
) -> Trainer:
    """A trainer whose optimiser `make` builds, over one group for each 6 parameters."""
    trainer = build_trainer(
        lock,
        folder,
        "--trainer.callbacks.lm_evaluator.enabled=false",
        *overrides,
        world=world,
        callbacks=callbacks,
    )
    module = trainer.train_module
    parameters = list(module.model.parameters())
    module.optimizer = make(
        [
            {"params": parameters[i : i + 6], "lr": 1e-3 * (i + 1), "peak_lr": 1e-3 * (i + 1)}
            for i in range(0, len(parameters), 6)
        ]
    )
    return trainer


def of(kind: type[Optimizer], **options: Any) -> Make:
    """Build `kind` with options; torch's Muon takes matrices alone."""

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        if kind is torch.optim.Muon:
            for group in groups:
                group["params"] = [p for p in group["params"] if p.ndim == 2]
        return kind([group for group in groups if group["params"]], **options)

    return make


class Odd(Optimizer):
    """State in lists, mappings, plain numbers and groups; some of it from the second step."""

    def __init__(self, groups: list[dict[str, Any]], *, local: bool = False) -> None:
        super().__init__(groups, {"lr": 1e-3, "d": 1e-2})
        self.local = local

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["d"] *= 1.25
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0) + 1
                moments = state.setdefault("moments", [torch.zeros_like(parameter), float("-inf")])
                gradient = parameter.grad
                if isinstance(gradient, DTensor) and not self.local:
                    gradient = gradient.full_tensor()
                elif isinstance(gradient, DTensor):
                    gradient = gradient.to_local()
                moments[1] = max(moments[1], float(gradient.abs().max()))
                if state["seen"] > 1:
                    slow = state.setdefault("slow", {"mean": parameter.clone(), "kind": "ema"})
                    slow["mean"].lerp_(parameter, 0.1)
                    parameter.lerp_(slow["mean"], 0.05)
                moments[0].lerp_(parameter.grad, 0.2)
                size = moments[1] + state["seen"]
                parameter.sub_(moments[0], alpha=group["lr"] * group["d"] * group["count"] / size)


class Closed(torch.optim.SGD):
    """Keeps what no checkpoint can hold."""

    def __init__(self, groups: list[dict[str, Any]], where: str) -> None:
        super().__init__(groups)
        self.where = where

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        parameter: nn.Parameter = self.param_groups[0]["params"][0]
        if self.where == "parameter":
            self.state[parameter]["history"] = {"set": {1, 2}}
        elif self.where == "nowhere":
            self.state["shared"] = {"count": 1}  # type: ignore[index]
        else:
            self.param_groups[1]["object"] = object()
