"""Ranks that exchange tensors, and an exchange whose gradient goes the other way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from olm_train.distributed.world import World
from olm_train.parallel.mesh import Mesh

Way = Callable[[Tensor], Tensor]


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
