"""What all optimiser configurations share: options, groups, and state from the start.

The state is created when the optimiser is, not at its first step, so that a checkpoint of step 0
is complete and a loaded state replaces an existing one tensor by tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import nn
from torch.optim import Optimizer

from olm_data.config.convert import Config
from olm_data.config.hints import NonNegativeFloat
from olm_train.optim.groups import GroupOverride, ParamGroup, parameter_groups

Decay = Annotated[float, Meta(ge=0, lt=1)]
"""What a moving average keeps of itself at a step."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Config, ABC):
    """Options of every optimiser.

    Attributes:
        lr: peak learning rate; the schedule multiplies it.
        betas: decay rates of the moments.
        weight_decay: decay of matrices, a fraction of lr per step; decoupled but for `adam`.
        decay_embeddings: decay embedding tables too.
        group_overrides: parameters with options of their own, such as
            `[{params: ["blocks.0.*"], opts: {lr: 1e-4}}]`; one that stands in two items, or a
            pattern without one, is refused.
    """

    lr: NonNegativeFloat = 3e-4
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.1
    decay_embeddings: bool = False
    group_overrides: list[GroupOverride] = field(default_factory=list)

    group_options: ClassVar[tuple[str, ...]] = ("betas",)
    """Options that a group may replace beside those of every optimiser."""

    def build(self, model: nn.Module) -> Optimizer:
        """Build the optimiser over the parameters of `model`, whole or sharded.

        Each of its groups has "peak_lr", which the schedule multiplies.

        Raises:
            UsageError: an override does not fit the model.
        """
        groups = parameter_groups(
            model,
            weight_decay=self.weight_decay,
            decay_embeddings=self.decay_embeddings,
            overrides=self.group_overrides,
            known=self.group_options,
        )
        for group in groups:
            group["peak_lr"] = group.setdefault("lr", self.lr)
        return self._build(model, groups)

    @abstractmethod
    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Optimizer:
        """Return the optimiser over groups that have "params", "names" and their options."""
