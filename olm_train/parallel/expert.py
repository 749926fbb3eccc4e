"""Expert parallelism: experts are dealt to ranks, and each token goes to the ranks that have its.

    rows by expert --all-to-all--> rows of this rank's experts, of one rank after another
                   -> by expert -> products -> as they came
                   --all-to-all--> what the experts made of the rows, in the order they were sent in

The ranks of a group hold other experts and have other tokens. The gradient of an expert is computed
where the expert is, from the tokens of all ranks of the group; what is left to sum is over groups.
How many rows go where is known on the devices alone: each exchange waits for them once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from olm_data.errors import UsageError
from olm_train.distributed.world import World
from olm_train.model.decoder import Decoder
from olm_train.model.mixture import Experts, MixtureConfig, MixtureOfExperts, Reordered, inverse
from olm_train.parallel.exchange import both_ways, device_mesh, send_rows
from olm_train.parallel.mesh import EXPERT, Mesh, require_as_many

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult


class DealtExperts:
    """Computes with experts that lie on the ranks of `group`, as many on each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, group.size()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Map [N, d_model] to [N, d_model]; all ranks of the group together.

        Args:
            rows: those of the first expert of all, then those of the next.
            counts: int64 [E], rows of each expert.
        """
        sent = counts.view(self._ranks, -1)  # [ranks, experts of a rank]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        to, of = torch.stack((sent.sum(1), received.sum(1))).tolist()

        def out_of(x: Tensor) -> Tensor:
            return send_rows(x, to, of, self._group)

        def back_to(x: Tensor) -> Tensor:
            return send_rows(x, of, to, self._group)

        here = both_ways(rows, out_of, back_to)
        numbers = torch.arange(sent.shape[1], device=rows.device).repeat(self._ranks)
        numbers = numbers.repeat_interleave(received.flatten(), output_size=sum(of))
        order = numbers.argsort(stable=True)
        places = inverse(order)
        here = Reordered.apply(here, places, order)  # type: ignore[no-untyped-call]
        ends = received.sum(0).cumsum(0).to(torch.int32)
        if not sum(of):  # products of no rows have no gradient: one of zeros for the last expert
            here, ends = torch.cat((here, here.new_zeros(1, here.shape[1]))), ends.clone()
            ends[-1] = 1
        out = experts(here, ends)[: sum(of)]
        out = Reordered.apply(out, order, places)  # type: ignore[no-untyped-call]
        return both_ways(out, back_to, out_of)


def deal_experts(
    model: Decoder, mesh: Mesh, world: World
) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
    """Leave each rank its experts of a model on the device "meta"; every rank calls it.

    Their parameters become DTensors over the ranks that they are dealt to.

    Returns:
        What FSDP2 asks of each parameter: those of experts are to be cut by the rows of each
        matrix, over ranks of their own; None: another parameter.

    Raises:
        UsageError: the model has no experts, or some that cannot be dealt or cut so.
    """
    require_dealable(model, mesh)
    sizes = {axis: mesh.degree(axis) for axis in ("dp_replicate", *EXPERT.sharded, "ep")}
    ranks = device_mesh(mesh, world, sizes)
    for mixture in model.modules():
        if not isinstance(mixture, MixtureOfExperts):
            continue
        mixture.through = DealtExperts(ranks.get_group("ep"))
        for name, whole in list(mixture.experts.named_parameters()):
            own = whole.detach()[: len(whole) // mesh.ep].clone()
            mine = DTensor.from_local(own, ranks["ep"], [Shard(0)], run_check=False)
            setattr(mixture.experts, name, nn.Parameter(mine, requires_grad=whole.requires_grad))
    return placements(ranks, "ep", Shard(1))


def placements(
    ranks: DeviceMesh, axis: str, cut: Shard
) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
    """Return what FSDP2 asks of each parameter: how those that are DTensors along `axis`, the last
    one of `ranks`, are to be cut over the others; None: another parameter."""
    # What the documented `shard_placement_fn` returns has no public name.
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    names = ranks.mesh_dim_names
    assert names is not None
    rest = ranks[names[:-1]]
    if rest.ndim == 1:
        info = FSDPMeshInfo(rest, shard_mesh_dim=0)
    else:
        info = HSDPMeshInfo(rest, shard_mesh_dim=1, replicate_mesh_dim=0)
    placed = ShardPlacementResult(cut, info)

    def placement(parameter: nn.Parameter) -> ShardPlacementResult | None:
        tensor: Tensor = parameter
        mine = isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names == (axis,)
        return placed if mine else None

    return placement


def require_dealable(model: Decoder, mesh: Mesh) -> None:
    """Refuse a model whose experts cannot be dealt to the ranks of a mesh.

    Raises:
        UsageError: why, and what to set instead.
    """
    config, where = model.config.feed_forward, "train_module.ep_config.degree"
    if not isinstance(config, MixtureConfig):
        raise UsageError(
            "the model has no experts to deal to ranks",
            where="train_module.ep_config",
            fix="leave it out, or set model.feed_forward.name: moe",
        )
    require_as_many(mesh.ep, config.n_experts, "experts of a block", where)
    shards = mesh.degree(*EXPERT.sharded)
    rows = math.gcd(2 * config.hidden_size, model.config.d_model)
    if rows % shards:
        raise UsageError(
            f"matrices of experts cannot be cut evenly over {shards} ranks",
            where=where,
            why=f"ranks / degree has to divide d_model {model.config.d_model} and twice the "
            f"hidden_size {config.hidden_size}",
            fix="set a larger degree, or dp_config.name: hsdp with a smaller shard_degree",
        )
