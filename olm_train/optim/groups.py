"""Parameter groups: which options hold for which parameter, each one claimed exactly once.

parameters --overrides, by pattern--> one group an override
           --the rest---------------> one more
each of them: matrices, which decay | vectors and tables, which do not
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from olm_data.config.convert import Config
from olm_data.config.hints import NonNegativeFloat
from olm_data.errors import UsageError, suggest
from olm_train.model.layers import Embedding

PLACE = "train_module.optim.group_overrides"


ParamGroup = dict[str, Any]
"""A group as torch's optimisers have it: "params", "names" and the options of that optimiser."""

GroupOptions = Mapping[str, NonNegativeFloat | tuple[NonNegativeFloat, NonNegativeFloat]]


@dataclass(frozen=True, kw_only=True)
class GroupOverride(Config):
    """Options of some parameters.

    Attributes:
        params: names of parameters, or patterns with `*` and `?`; together they match at least one.
        opts: options of the optimiser for them, such as `{lr: 1e-4, weight_decay: 0}`;
            `max_grad_norm` clips them by their own norm instead of with all others.
    """

    params: list[str]
    opts: GroupOptions = field(default_factory=dict)


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    decay_embeddings: bool,
    overrides: Sequence[GroupOverride] = (),
    known: Collection[str] = (),
) -> list[ParamGroup]:
    """Split the trainable parameters into groups with options of their own.

    Without an override, matrices decay. Vectors (norm weights) never do: decay would pull a scale
    that starts at one towards zero. Embedding tables do only where asked: a row that a batch does
    not contain would shrink without a gradient to hold it. A tied table is an embedding table.

    Args:
        known: options of the optimiser that `opts` may replace, beside those of every optimiser.

    Returns:
        Optimiser groups `{"params": [...], "names": [...], "weight_decay": float, ...}`, without
        empty ones, in a fixed order; parameters in the model's order.

    Raises:
        UsageError: an override names no parameter or an unknown option, or two claim one parameter.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tables = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Embedding)
    }
    owner = _owners(list(named), overrides)
    options: list[GroupOptions] = [{}, *(override.opts for override in overrides)]
    for number, override in enumerate(overrides):
        _refuse_unknown(override.opts, known, f"{PLACE}[{number}].opts")
    groups: list[ParamGroup] = [
        {"params": [], "names": [], "weight_decay": decay, **opts}
        for opts in options
        for decay in (weight_decay, 0.0)
    ]
    for name, parameter in named.items():
        decays = parameter.ndim >= 2 and (decay_embeddings or name not in tables)
        group = groups[2 * owner.get(name, 0) + (not decays)]
        group["params"].append(parameter)
        group["names"].append(name)
    return [group for group in groups if group["params"]]


def apart(
    groups: Sequence[ParamGroup], kind: Callable[[str], Any]
) -> Iterator[tuple[ParamGroup, Any]]:
    """Yield groups of parameters of one kind, in the order of the first ones, and the kind."""
    for group in groups:
        kinds: dict[Any, ParamGroup] = {}
        for name, parameter in zip(group["names"], group["params"], strict=True):
            own = kinds.setdefault(kind(name), {**group, "params": [], "names": []})
            own["params"].append(parameter)
            own["names"].append(name)
        yield from ((own, each) for each, own in kinds.items())


def device_of(groups: Sequence[ParamGroup]) -> torch.device:
    """Return the device of the parameters; "meta" have those of other ranks, if not all."""
    devices: list[torch.device] = [
        parameter.device for group in groups for parameter in group["params"]
    ]
    return next((device for device in devices if device.type != "meta"), devices[0])


def _owners(names: Sequence[str], overrides: Sequence[GroupOverride]) -> dict[str, int]:
    """Return the number, from 1, of the override that claims each parameter that one claims."""
    owner: dict[str, int] = {}
    for number, override in enumerate(overrides, 1):
        for pattern in override.params:
            found = [name for name in names if fnmatchcase(name, pattern)]
            if not found:
                raise UsageError(
                    f"no parameter is called {pattern!r}",
                    where=f"{PLACE}[{number - 1}].params",
                    fix=suggest(pattern, names),
                )
            for name in found:
                if owner.setdefault(name, number) != number:
                    raise UsageError(
                        f"the parameter {name} is claimed twice: by overrides "
                        f"{owner[name] - 1} and {number - 1}",
                        where=f"{PLACE}[{number - 1}].params",
                        fix="let each parameter match the patterns of one override",
                    )
    return owner


def _refuse_unknown(opts: GroupOptions, known: Collection[str], where: str) -> None:
    allowed = ["lr", "weight_decay", "max_grad_norm", *known]
    for name, value in opts.items():
        if name not in allowed:
            raise UsageError(
                f"the optimiser has no option {name!r} for a group",
                where=where,
                fix=suggest(name, allowed),
            )
        if isinstance(value, tuple) != (name == "betas"):
            raise UsageError(f"{name}: {value!r} is out of range", where=f"{where}.{name}")
