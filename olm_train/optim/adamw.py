"""AdamW (Loshchilov and Hutter, 2019): configuration, groups and state that exists from the start.

The state is created when the optimiser is, not at its first step, so that a checkpoint of step 0
is complete and a loaded state replaces an existing one tensor by tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from olm_data.errors import UsageError
from olm_train.optim.groups import decay_groups

FUSED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Options of AdamW.

    Attributes:
        name: what a configuration calls it.
        lr: peak learning rate; the schedule multiplies it.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices, a fraction of lr per step.
        decay_embeddings: decay embedding tables too.
        fused: one kernel over all tensors; None: where the device has one.
    """

    name: Literal["adamw"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    fused: bool | None = None

    def __post_init__(self) -> None:
        # A YAML list arrives as a list; a frozen config holds a tuple.
        object.__setattr__(self, "betas", tuple(self.betas))
        for field, good in (
            ("lr", self.lr >= 0),
            ("betas", len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)),
            ("eps", self.eps > 0),
            ("weight_decay", self.weight_decay >= 0),
        ):
            if not good:
                raise UsageError(
                    f"optim.{field}: {getattr(self, field)!r} is out of range",
                    where=f"train_module.optim.{field}",
                )

    def build(self, model: nn.Module) -> torch.optim.AdamW:
        """Build the optimiser over the parameters of `model`, whole or sharded."""
        groups = decay_groups(
            model, weight_decay=self.weight_decay, decay_embeddings=self.decay_embeddings
        )
        device = groups[0]["params"][0].device.type
        fused = device in FUSED_DEVICES if self.fused is None else self.fused
        optimizer = torch.optim.AdamW(
            groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused
        )
        for group in groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    # The fused kernel wants the step count beside the weights.
                    "step": torch.zeros((), device=parameter.device if fused else "cpu"),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return optimizer
