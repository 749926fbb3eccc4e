"""AdamW (Loshchilov and Hutter, 2019), Adam (Kingma and Ba, 2015), and AdamW that skips spikes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from olm_data.config.hints import PositiveFloat
from olm_data.errors import UsageError
from olm_train.optim.base import OptimConfig, no_rates
from olm_train.optim.groups import ParamGroup, device_of
from olm_train.optim.half import DTYPES, HalfAdam, HalfAdamW, MomentDtype
from olm_train.stability.gate import SkipStepOptions, StepGuard

FUSED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class _AdamConfig(OptimConfig):
    """Options of Adam and AdamW.

    Attributes:
        eps: added to the root of the second moment.
        fused: one kernel over all tensors; null: where the device has one.
        dtype: of the moments; bfloat16 takes half the memory, and is rounded by chance.
    """

    eps: PositiveFloat = 1e-8
    fused: bool | None = None
    dtype: MomentDtype = "float32"

    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW
    half: ClassVar[type[HalfAdam]] = HalfAdamW
    group_options = ("betas", "eps")

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Optimizer:
        device = device_of(groups).type
        fused = device in FUSED_DEVICES if self.fused is None else self.fused
        dtype = DTYPES[self.dtype]
        kind = self.kind if dtype is torch.float32 else self.half
        optimizer = kind(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)
        for group in groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    # The fused kernel wants the step count beside the weights.
                    "step": torch.zeros((), device=parameter.device if fused else "cpu"),
                    "exp_avg": torch.zeros_like(parameter, dtype=dtype),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
                }
        return optimizer


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(_AdamConfig):
    """AdamW: weights decay beside the gradient."""

    name: Literal["adamw"] = "adamw"


@dataclass(frozen=True, kw_only=True)
class AdamConfig(_AdamConfig):
    """Adam: weight decay is a part of the gradient, as in the paper's time."""

    name: Literal["adam"] = "adam"
    kind = torch.optim.Adam
    half = HalfAdam

    def _gains(self, model: nn.Module) -> Mapping[str, float]:
        if self.weight_decay:
            raise no_rates(self.name, "its weight decay is a part of the gradient")
        return {}


@dataclass(frozen=True, kw_only=True)
class SkipStepAdamWConfig(SkipStepOptions, _AdamConfig):
    """AdamW that leaves out a step whose loss or gradient norm is a spike."""

    name: Literal["skip_step_adamw"] = "skip_step_adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fused is False:
            raise UsageError(
                "only the fused kernel can leave out a step on the device",
                where="fused",
                fix="leave it out",
            )

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Optimizer:
        optimizer = super()._build(model, groups)
        guard = StepGuard(self, device_of(groups))
        optimizer.guard = guard  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(_ask_guard)
        return optimizer


def _ask_guard(optimizer: Any, *_: object) -> None:
    """Hand what the guard has decided to the kernel, whoever takes the step."""
    place = device_of(optimizer.param_groups)  # the host with cpu_offload
    optimizer.found_inf = optimizer.guard.skipped().to(place)
    optimizer.grad_scale = None
