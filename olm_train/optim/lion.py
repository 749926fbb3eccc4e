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
from olm_train.optim.groups import ParamGroup, device_of
from olm_train.optim.half import DTYPES, MomentDtype, Rounding, numbered
from olm_train.stability.gate import SkipStepOptions, StepGuard


class Lion(Optimizer):
    """Lion with decoupled weight decay; state: "exp_avg" of each parameter.

    Args:
        groups: with "params", "lr", "betas" and "weight_decay".
        dtype: of the momentum; bfloat16 is rounded by chance.

    Attributes:
        guard: decides which steps are left out; None: none.
    """

    def __init__(self, groups: list[ParamGroup], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(groups, {})
        self.guard: StepGuard | None = None
        self._rounding = Rounding(self.param_groups, dtype)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"exp_avg": torch.zeros_like(parameter, dtype=dtype)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step; one that is left out changes neither weights nor state."""
        assert closure is None
        take = None if self.guard is None else self.guard.skipped() == 0
        for number, group, parameter, gradient in numbered(self.param_groups):
            beta1, beta2 = group["betas"]
            kept = self.state[parameter]["exp_avg"]
            mean = kept.to(gradient.dtype)
            update = mean.lerp(gradient, 1 - beta1).sign_()
            weight = parameter * (1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-group["lr"])
            moved = mean.lerp(gradient, 1 - beta2)
            if take is not None:
                weight = torch.where(take, weight, parameter)
                moved = torch.where(take, moved, mean)
            parameter.copy_(weight)
            self._rounding.keep(moved, kept, number, group)


@dataclass(frozen=True, kw_only=True)
class LionConfig(OptimConfig):
    """Lion. Rates are some 3 to 10 times smaller than AdamW's, decay as much larger.

    Attributes:
        lr: peak learning rate.
        betas: of the update, and of the momentum that is kept.
        dtype: of the momentum; bfloat16 takes half the memory, and is rounded by chance.
    """

    name: Literal["lion"] = "lion"
    lr: NonNegativeFloat = 1e-4
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    dtype: MomentDtype = "float32"

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Lion:
        for group in groups:
            group.setdefault("betas", self.betas)
        return Lion(groups, DTYPES[self.dtype])


@dataclass(frozen=True, kw_only=True)
class SkipStepLionConfig(SkipStepOptions, LionConfig):
    """Lion that leaves out a step whose loss or gradient norm is a spike."""

    name: Literal["skip_step_lion"] = "skip_step_lion"  # type: ignore[assignment]

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Lion:
        optimizer = super()._build(model, groups)
        optimizer.guard = StepGuard(self, device_of(groups))
        return optimizer
