"""Parameter groups: which parameters decay, with proof that each one is claimed exactly once."""

from __future__ import annotations

from typing import Any

from torch import nn

from olm_train.model.decoder import Embedding


def decay_groups(
    model: nn.Module, *, weight_decay: float, decay_embeddings: bool
) -> list[dict[str, Any]]:
    """Split the trainable parameters into those that decay and those that do not.

    Matrices decay. Vectors (norm weights) never do: decay would pull a scale that starts at one
    towards zero. Embedding tables do only where asked: a row that a batch does not contain would
    shrink without a gradient to hold it. A tied table is an embedding table.

    Returns:
        Optimiser groups `{"params": [...], "names": [...], "weight_decay": float}`, without empty
        ones, in a fixed order; parameters in the model's order.
    """
    tables = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Embedding)
    }
    groups: list[dict[str, Any]] = [
        {"params": [], "names": [], "weight_decay": decay} for decay in (weight_decay, 0.0)
    ]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= 2 and (decay_embeddings or name not in tables)
        group = groups[0 if decays else 1]
        group["params"].append(parameter)
        group["names"].append(name)
    groups = [group for group in groups if group["params"]]
    check_claims(model, groups)
    return groups


def check_claims(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Check that each trainable parameter stands in exactly one group.

    Raises:
        ValueError: names the parameters claimed by none or by several groups, or unknown.
    """
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    claimed = [name for group in groups for name in group["names"]]
    wrong = {
        "claimed by no group": wanted - set(claimed),
        "claimed more than once": {name for name in claimed if claimed.count(name) > 1},
        "not a trainable parameter": set(claimed) - wanted,
    }
    found = [f"{what}: {', '.join(sorted(names))}" for what, names in wrong.items() if names]
    if found:
        raise ValueError("optimiser groups do not cover the model: " + "; ".join(found))
