"""Which parts of any model FSDP2 gathers and frees as a whole: by class, or by size.

    model -> modules of these classes | modules of at least so many parameters, innermost first
          -> apply.spread: fully_shard each of them, then the model

Pure: nothing is wrapped here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from olm_data.errors import UsageError

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""They have no forward pass of their own, at which their weights could be gathered."""


def units(
    model: nn.Module,
    wrap_classes: Collection[type[nn.Module]] = (),
    min_num_params: int | None = None,
) -> list[nn.Module]:
    """Return the modules to wrap besides `model` itself, each after those inside it.

    Args:
        wrap_classes: each module of one of these classes.
        min_num_params: each module with at least so many parameters that are in no unit inside
            it; None: by class alone. Neither: none but the model. A module with a parameter that
            is tied to one outside of it is left out, and so goes with what is around it.

    Raises:
        UsageError: the model has no module of one of the classes, or both are given.
    """
    if wrap_classes and min_num_params is not None:
        raise UsageError("wrap_classes and min_num_params are given", fix="give one of them")
    modules = [module for module in model.modules() if module is not model]
    if min_num_params is None:
        for kind in wrap_classes:
            if not any(isinstance(module, kind) for module in modules):
                raise UsageError(
                    f"the model has no {kind.__name__} inside it",
                    where="wrap_classes",
                    fix=f"one of {', '.join(sorted({type(m).__name__ for m in modules}))}",
                )
        chosen = [module for module in modules if isinstance(module, tuple(wrap_classes))]
        tied = _tied(model)
        return [module for module in chosen[::-1] if module not in tied]
    found: list[nn.Module] = []
    _by_size(model, min_num_params, found, _tied(model))
    return [module for module in found if module is not model]


def _tied(model: nn.Module) -> set[nn.Module]:
    """Return the modules with a parameter that is used outside of them too.

    Cut with one of its users it would be another parameter for the others.
    """
    users = _users(model)
    return {m for m in model.modules() if any(users[p] > n for p, n in _users(m).items())}


def _users(module: nn.Module) -> Counter[nn.Parameter]:
    """Return how many modules, this one and those inside, hold each parameter themselves."""
    return Counter(p for each in module.modules() for p in each.parameters(recurse=False))


def _by_size(module: nn.Module, least: int, found: list[nn.Module], tied: set[nn.Module]) -> int:
    """Add the units in and at a module; return its parameters that are in none of them."""
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if isinstance(module, nn.MultiheadAttention):  # reads the weights of what is inside it
        own = sum(parameter.numel() for parameter in module.parameters())
    else:
        own += sum(_by_size(child, least, found, tied) for child in module.children())
    if own < least or isinstance(module, CONTAINERS) or module in tied:
        return own
    found.append(module)
    return 0
