"""Moments in bfloat16: half the memory of an optimiser, and right on average.

    bf16 --exact--> fp32 --the step--> fp32 --rounded up or down by chance--> bf16

Rounding to the nearest would lose each change below a 256th of a moment, which for beta2 = 0.999
are nearly all. The chance is drawn anew for each step and parameter from their numbers alone: a run
that goes on draws what an undisturbed one does, and all copies of a weight the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from olm_train.model.shards import local_part
from olm_train.optim.groups import ParamGroup

MomentDtype = Literal["float32", "bfloat16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ROUNDS = "rounds"
"""Key of a group: steps it has rounded; a checkpoint keeps it, as all options that change."""
PIECE = 1 << 22
"""Elements that are fp32 at a time."""


class Rounding:
    """Keeps moments in their dtype, bfloat16 by chance.

    Args:
        groups: of the optimiser.
        dtype: of its moments.
    """

    def __init__(self, groups: list[ParamGroup], dtype: torch.dtype) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}
        for group in groups if dtype is torch.bfloat16 else ():
            group[ROUNDS] = 0

    def seed(self, number: int, group: ParamGroup, device: torch.device) -> torch.Generator:
        """Return what draws for the `number`-th parameter in this step of its group."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        return generator.manual_seed(group[ROUNDS] << 24 | number)

    def keep(self, value: Tensor, target: Tensor, number: int, group: ParamGroup) -> None:
        """Put a new value of a moment of a parameter into `target`."""
        if value.dtype == target.dtype:
            target.copy_(value)
        else:
            generator = self.seed(number, group, target.device)
            round_by_chance(local_part(value), local_part(target), generator)


def round_by_chance(value: Tensor, target: Tensor, generator: torch.Generator) -> None:
    """Round `value`, fp32, into `target`, of the same shape and bfloat16.

    One of the two neighbours, with a mean of `value`; what is bfloat16 already stays.
    """
    chance = torch.randint(
        1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator
    )
    bits = chance.add_(value.view(torch.int32)).bitwise_and_(-1 << 16)
    target.copy_(bits.view(torch.float32))


def numbered(groups: list[ParamGroup]) -> Iterator[tuple[int, ParamGroup, Tensor, Tensor]]:
    """Begin a step; yield number, group, parameter and gradient, where there is one."""
    number = 0
    for group in groups:
        if ROUNDS in group:
            group[ROUNDS] += 1
        for parameter in group["params"]:
            number += 1
            if parameter.grad is not None:
                yield number, group, parameter, parameter.grad


def adam_kernel(
    group: ParamGroup,
    weights: list[Tensor],
    gradients: list[Tensor],
    moments: tuple[list[Tensor], list[Tensor]],
    steps: list[Tensor],
    *,
    fused: bool,
    decoupled: bool,
    found_inf: Tensor | None = None,
) -> None:
    """Take a step of Adam, or of AdamW, by torch's kernel.

    Args:
        group: its "lr", "betas", "eps" and "weight_decay".
        moments: first and second ones.
        decoupled: AdamW.
        found_inf: 1 on the device: nothing changes; fused kernels alone know it.
    """
    beta1, beta2 = group["betas"]
    adam(
        weights,
        gradients,
        *moments,
        [],
        steps,
        fused=fused,
        found_inf=found_inf,
        decoupled_weight_decay=decoupled,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def step_adam(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    group: ParamGroup,
    generator: torch.Generator,
    **options: Any,
) -> None:
    """Take a step of a parameter.

    Args:
        state: "step", and "exp_avg" and "exp_avg_sq" in bfloat16.
        options: of `adam_kernel`.
    """
    changed = (parameter, state["exp_avg"], state["exp_avg_sq"])  # in place: views, or an error
    pieces = [local_part(each).view(-1).split(PIECE) for each in changed]
    gradients, step = local_part(gradient).reshape(-1).split(PIECE), state["step"]
    for change, weight, *moments in zip(gradients, *pieces, strict=True):
        (mean, square), step = [moment.float() for moment in moments], state["step"].clone()
        adam_kernel(group, [weight], [change], ([mean], [square]), [step], **options)
        for value, target in zip((mean, square), moments, strict=True):
            round_by_chance(value, target, generator)
    state["step"].copy_(step)


class HalfAdam(Optimizer):
    """Adam with moments in bfloat16.

    Args:
        groups: with "params", "lr" and "weight_decay".
        defaults: of "betas", "eps" and "fused".
    """

    decoupled: ClassVar[bool] = False

    def __init__(self, groups: list[ParamGroup], **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self._rounding = Rounding(self.param_groups, torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step; where `found_inf` is 1, nothing changes but what chance is drawn next."""
        assert closure is None
        for number, group, parameter, gradient in numbered(self.param_groups):
            step_adam(
                parameter,
                gradient,
                self.state[parameter],
                group,
                self._rounding.seed(number, group, parameter.device),
                fused=group["fused"],
                decoupled=self.decoupled,
                found_inf=getattr(self, "found_inf", None) if group["fused"] else None,
            )


class HalfAdamW(HalfAdam):
    """AdamW with moments in bfloat16."""

    decoupled = True
