"""Ranks that exchange tensors, and an exchange whose gradient goes the other way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from olm_train.distributed.world import World
from olm_train.parallel.mesh import Axis, Mesh, Ranks

Way = Callable[[Tensor], Tensor]


def new_groups(mesh: Mesh, world: World, axis: Axis) -> tuple[Ranks, dist.ProcessGroup]:
    """Return the ranks that differ from this one along an axis, and the group that is made of them;
    every rank calls it."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in mesh.groups(axis)}
    own = mesh.group(world.rank, axis)
    return own, made[own]


def device_mesh(mesh: Mesh, world: World, sizes: Mapping[Any, int]) -> DeviceMesh:
    """Return torch's mesh of the ranks that have the same layers as this one; every rank calls it.

    Args:
        sizes: of its dimensions by name, the last one fastest; of one copy there is no dimension.
    """
    axes = {axis: size for axis, size in sizes.items() if axis != "dp_replicate" or size > 1}
    names, stages = tuple(axes), {"pp": mesh.pp} if mesh.pp > 1 else {}
    shape = (*stages.values(), *axes.values())
    ranks = init_device_mesh(world.device.type, shape, mesh_dim_names=(*stages, *names))
    return ranks[names] if stages else ranks


def send_rows(x: Tensor, to: list[int], of: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first `to[0]` rows to the first rank, ...; return `of[0]` rows from it, ..."""
    out = x.new_empty((sum(of), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), of, to, group=group)
    return out


def both_ways(x: Tensor, there: Way, back: Way) -> Tensor:
    """Return `there(x)`; its gradient is `back` of the gradient. Neither is differentiated."""
    out: Tensor = _BothWays.apply(x, there, back)  # type: ignore[no-untyped-call]
    return out


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(upstream[0]), None, None
