"""Lion (Chen et al., 2023): the sign of an interpolated momentum. And Lion that skips spikes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from olm_data.config.hints import NonNegativeFloat
from olm_train.optim.base import Decay, OptimConfig
from olm_train.optim.groups import ParamGroup
from olm_train.stability.spikes import SkipStepOptions, StepGuard


class Lion(Optimizer):
    """Lion with decoupled weight decay; state: "exp_avg" of each parameter.

    Args:
        groups: with "params", "lr", "betas" and "weight_decay".
        guard: decides which steps are left out; None: none.
    """

    def __init__(self, groups: list[ParamGroup], guard: StepGuard | None = None) -> None:
        super().__init__(groups, {})
        self.guard = guard
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step; one that is left out changes neither weights nor state."""
        assert closure is None
        take = None if self.guard is None else self.guard.skipped() == 0
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter]["exp_avg"]
                update = mean.lerp(parameter.grad, 1 - beta1).sign_()
                weight = parameter * (1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"])
                moved = mean.lerp(parameter.grad, 1 - beta2)
                for old, new in ((parameter, weight), (mean, moved)):
                    old.copy_(new if take is None else torch.where(take, new, old))


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimConfig):
    """Lion. Rates are some 3 to 10 times smaller than AdamW's, decay as much larger.

    Attributes:
        lr: peak learning rate.
        betas: of the update, and of the momentum that is kept.
    """

    name: Literal["lion"] = "lion"
    lr: NonNegativeFloat = 1e-4
    betas: tuple[Decay, Decay] = (0.9, 0.99)

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Lion:
        for group in groups:
            group.setdefault("betas", self.betas)
        return Lion(groups)


@dataclass(frozen=True, kw_only=True)
class SkipStepLionConfig(SkipStepOptions, LionConfig):
    """Lion that leaves out a step whose loss or gradient norm is a spike."""

    name: Literal["skip_step_lion"] = "skip_step_lion"  # type: ignore[assignment]

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Lion:
        optimizer = super()._build(model, groups)
        optimizer.guard = StepGuard(self, groups[0]["params"][0].device)
        return optimizer
