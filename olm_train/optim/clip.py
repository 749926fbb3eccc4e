"""Gradient clipping: by the norm of all, and of groups that have a limit of their own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

OWN = "max_grad_norm"


def clip_gradients(optimizer: Optimizer, norm: Tensor, max_grad_norm: float | None) -> None:
    """Scale gradients down to their limits.

    Args:
        optimizer: its groups may have "max_grad_norm": their gradients are clipped by their own
            norm, and count in no other.
        norm: 2-norm of all gradients together, of the global batch.
        max_grad_norm: limit of all that has none of its own; None: no limit.
    """
    own = [group for group in optimizer.param_groups if OWN in group]
    rest = [p for g in optimizer.param_groups if OWN not in g for p in g["params"]]
    for group in own:
        torch.nn.utils.clip_grads_with_norm_(
            group["params"], group[OWN], total_norm(group["params"])
        )
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(rest, max_grad_norm, total_norm(rest) if own else norm)


def total_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of the gradients of parameters, whole or sharded, together."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def as_scalar(norm: Tensor) -> Tensor:
    """Return a norm as a plain scalar, the same bits on each rank."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
