"""Gradient clipping: by the norm of all, and of groups that have a limit of their own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from olm_train.model.shards import local_part

OWN = "max_grad_norm"


def clip_gradients(
    optimizer: Optimizer,
    norm: Tensor,
    max_grad_norm: float | None,
    stages: dist.ProcessGroup | None = None,
) -> None:
    """Scale gradients down to their limits.

    Args:
        optimizer: its groups may have "max_grad_norm": their gradients are clipped by their own
            norm, and count in no other.
        norm: 2-norm of all gradients together, of the global batch.
        max_grad_norm: limit of all that has none of its own; None: no limit.
        stages: see `total_norm`.
    """
    own = [group for group in optimizer.param_groups if OWN in group]
    rest = [p for g in optimizer.param_groups if OWN not in g for p in g["params"]]
    for group in own:
        _clip(group["params"], group[OWN], total_norm(group["params"], stages))
    if max_grad_norm is not None:
        _clip(rest, max_grad_norm, total_norm(rest, stages) if own else norm)


def _clip(parameters: Iterable[Tensor], limit: float, norm: Tensor) -> None:
    for alike in by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(alike, limit, norm)


def total_norm(parameters: Iterable[Tensor], stages: dist.ProcessGroup | None = None) -> Tensor:
    """Return the 2-norm of the gradients of parameters, whole or sharded, together.

    Args:
        stages: ranks that have other parameters; None: this one has all, or parts of all.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    kinds = by_mesh(gradients)
    if stages is None and not any(_shards(kind[0]) > 1 for kind in kinds):
        return torch.nn.utils.get_total_norm(gradients)
    squares = [_sum_of_squares(kind) for kind in kinds]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if stages is not None:
        total = _gathered_sum(total, stages)
    return total.sqrt()


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return tensors apart by the ranks that hold them, in the order of the first ones: torch
    computes with several tensors at once if these are the same."""
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(mesh, []).append(tensor)
    return list(found.values())


def _shards(tensor: Tensor) -> int:
    """Return along how many dimensions of its mesh a tensor is cut."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return sum(not placement.is_replicate() for placement in placements)


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return that of gradients of one mesh, over all ranks that hold parts of them.

    One exchange after another, and sums in the order of ranks: the same bits on each rank.
    """
    first, own = gradients[0], [local_part(gradient) for gradient in gradients]
    total = torch.nn.utils.get_total_norm(own).square()
    if isinstance(first, DTensor):
        for dim, placement in enumerate(first.placements):
            if not placement.is_replicate():  # what torch cuts within a cut is no Shard
                total = _gathered_sum(total, first.device_mesh.get_group(dim))
    return total


def _gathered_sum(total: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = total.new_empty(group.size())
    dist.all_gather_single(parts, total.reshape(1), group=group)
    return parts.sum()


def as_scalar(norm: Tensor) -> Tensor:
    """Return a norm as a plain scalar, the same bits on each rank."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
