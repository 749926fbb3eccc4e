"""What all optimiser configurations share: options, groups, and state from the start.

The state is created when the optimiser is, not at its first step, so that a checkpoint of step 0
is complete and a loaded state replaces an existing one tensor by tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import nn
from torch.optim import Optimizer

from olm_data.config.convert import Config
from olm_data.config.hints import NonNegativeFloat
from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.parametrization import Scaling
from olm_train.optim.groups import GroupOverride, ParamGroup, apart, parameter_groups

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

        Each of its groups has "peak_lr", which the schedule multiplies. The model's parametrization
        multiplies rates, decays and eps, those of overrides too.

        Raises:
            UsageError: an override does not fit the model, or the optimiser its parametrization.
        """
        groups = parameter_groups(
            model,
            weight_decay=self.weight_decay,
            decay_embeddings=self.decay_embeddings,
            overrides=self.group_overrides,
            known=self.group_options,
        )
        for group in groups:
            group.setdefault("lr", self.lr)
        if (scaling := scaling_of(model)) is not None:
            groups = self._scaled(groups, scaling, self._gains(model))
        for group in groups:
            group["peak_lr"] = group["lr"]
        return self._build(model, groups)

    def _scaled(
        self, groups: list[ParamGroup], scaling: Scaling, gains: Mapping[str, float]
    ) -> list[ParamGroup]:
        """Return groups of parameters whose options are multiplied by the same numbers."""
        found = []
        for group, factors in apart(groups, lambda name: scaling.options(name, gains.get(name, 0))):
            rate, decay, eps = factors
            group["lr"] *= rate
            group["weight_decay"] *= decay
            if "eps" in self.group_options and eps != 1:
                group["eps"] = group.get("eps", vars(self)["eps"]) * eps
            found.append(group)
        return found

    def _gains(self, model: nn.Module) -> Mapping[str, float]:
        """Return the `gain` of each matrix that is orthogonalised, by name.

        Raises:
            UsageError: the optimiser fits no parametrization.
        """
        return {}

    @abstractmethod
    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Optimizer:
        """Return the optimiser over groups that have "params", "names" and their options."""


def scaling_of(model: nn.Module) -> Scaling | None:
    """Return the parametrization of a model; None: it is `sp`, or no decoder."""
    config = getattr(model, "config", None)
    if not isinstance(config, DecoderConfig) or config.parametrization == "sp":
        return None
    return config.scaling


def no_rates(optimizer: str, why: str) -> UsageError:
    """Return the error of an optimiser that fits no parametrization."""
    return UsageError(
        f"model.parametrization has no rates for the optimiser {optimizer}",
        where="train_module.optim.name",
        why=why,
        fix="choose adamw, lion, muon or dion, or set model.parametrization: sp",
    )
