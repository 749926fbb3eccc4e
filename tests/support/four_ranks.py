"""What each of four ranks does for tests/olm_train/parallel/test_matrix.py; results by name.

One call for all of it: starting four processes is what costs time.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.parallel_checks import Traffic
from support.training import build, lost, micro_batches, train
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from olm_train.distributed.world import World
from olm_train.extensions.monitors.replica_checker import digests
from olm_train.train_module import TransformerTrainModule

STRATEGIES: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {}, "hsdp": {"num_replicas": 2}}
SAME_MATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "keep": ("hsdp", {"reshard_after_forward": False}),
    "prefetch": ("hsdp", {"prefetch_factor": 2}),
    "offload": ("hsdp", {"cpu_offload": True}),
    "all": ("hsdp", {"reshard_after_forward": False, "prefetch_factor": 1, "cpu_offload": True}),
    "in twos": ("fsdp", {"reshard_after_forward": 2}),
}
"""Options that change no bit of the result."""
CUT = [1, 1]


def all_checks(folder: str) -> dict[Any, Any]:
    """Run every check on this rank; `folder` gets the checkpoints."""
    # Two machines of two ranks each.
    first = dist.get_rank() // 2 * 2
    world = World(
        rank=dist.get_rank(), size=dist.get_world_size(), neighbours=range(first, first + 2)
    )
    results: dict[Any, Any] = {}
    for strategy, sharing in STRATEGIES.items():
        module = build(strategy, world=world, sharing=sharing)
        results[strategy] = train(module, CUT, steps=[1, 2])
        dcp.save(module.state_dict(), checkpoint_id=Path(folder) / strategy)
        for cut in ([2], CUT):
            results[strategy, "traffic", len(cut)] = _traffic(module, cut)
        results[strategy, "held"] = _held(module, Path(folder))
    for name, (strategy, options) in SAME_MATHS.items():
        sharing = STRATEGIES[strategy] | options
        module = build(strategy, world=world, sharing=sharing)
        results[name] = train(module, CUT, steps=[1, 2])
        results[name, "traffic"] = _traffic(module, CUT)
        results[name, "asked"] = _asked(module)
    results["meshes"] = _meshes(world)
    module = build("hsdp", world=world, sharing=STRATEGIES["hsdp"])
    batches = partial(micro_batches, rows=CUT, world=world)
    results["lost"] = lost(module, 2, batches, seconds=10)  # the last one
    return results


def _held(module: TransformerTrainModule, folder: Path) -> dict[str, Any]:
    """What this rank holds, whom its norm is summed with, who wrote which shard."""
    pieces = {piece for piece, _ in digests(module.state_dict()["model"]).values()}
    norm = torch.linalg.vector_norm(module.model.embeddings.weight.grad)  # not yet summed
    summed: list[str] = []
    if isinstance(norm, DTensor):
        axes = zip(norm.device_mesh.mesh_dim_names or (), norm.placements, strict=True)
        summed = [axis for axis, placement in axes if placement.is_partial()]
    stored = FileSystemReader(folder / module.config.dp_config.name).read_metadata().storage_data
    boxes = [
        (index.fqn, tuple(index.offset), int(file.relative_path.split("_")[2]))
        for index, file in stored.items()
        if index.offset  # not a scalar
    ]
    firsts = {name: sorted(at for other, at, _ in boxes if other == name) for name, *_ in boxes}
    written = {(firsts[name].index(at), rank) for name, at, rank in boxes}  # (shard, rank)
    return {"pieces": pieces, "norm": summed, "written": written}


def _traffic(module: TransformerTrainModule, cut: list[int]) -> dict[str, int]:
    """Collectives of a step that is not the first, by kind."""
    with Traffic() as traffic:
        module.train_step(micro_batches(2, cut, module.world), 2, 6)
    return dict(traffic.calls)


def _asked(module: TransformerTrainModule) -> list[str]:
    """Order in which a forward pass asks for weights, of how many ranks, and computes blocks."""
    (batch,) = micro_batches(1, [2], module.world)
    events: list[str] = []
    handles = [
        block.attention.register_forward_pre_hook(lambda *_, i=i: events.append(f"block {i}"))
        for i, block in enumerate(module.model.blocks)
    ]
    with Traffic(events):
        module.eval_batch(batch)
    for handle in handles:
        handle.remove()
    return [event for event in events if "gather" in event or "block" in event]


def _meshes(world: World) -> dict[str, dict[str, list[int]]]:
    """Ranks of this one's group along each axis of torch's mesh, under each way to say hsdp; two
    machines of two ranks."""
    ways: dict[str, dict[str, Any]] = {
        "default": {},
        "four replicas": {"num_replicas": 4},
        "one replica": {"shard_degree": 4},
    }
    meshes = {}
    for name, sharing in ways.items():
        module = build("hsdp", world=world, sharing=sharing)
        mesh = module.model.embeddings.weight.device_mesh
        meshes[name] = {
            axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in mesh.mesh_dim_names
        }
    return meshes
