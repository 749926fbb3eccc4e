"""The part of a tensor that is at home on this rank, and how a whole one is put into it.

A plain tensor is at home whole.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_block(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of `tensor`, sharing its memory, and where it lies in the whole.

    The part is empty where the tensor has fewer rows than there are ranks.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    where = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
    return tensor.to_local().detach(), where


@torch.no_grad()
def assign(target: Tensor, full: Tensor) -> None:
    """Copy a full tensor into `target`; of a sharded target each process keeps its own part."""
    part, where = local_block(target)
    part.copy_(full[where])


def is_first_holder(tensor: Tensor, *, main: bool) -> bool:
    """Whether this rank is the first of those that hold the same elements of a tensor.

    Args:
        tensor: whole or sharded.
        main: whether this is rank 0, which is the first holder of a whole one.
    """
    if not isinstance(tensor, DTensor):
        return main
    place = tensor.device_mesh.get_coordinate()
    return place is not None and all(
        place[dim] == 0
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )
