"""Device meshes over the processes of a run, with OLMo-core's names of their dimensions.

fsdp: ("dp_shard",)          hsdp: ("dp_replicate", "dp_shard"), a replica's ranks side by side
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from olm_train.distributed.world import World

REPLICATE = "dp_replicate"
SHARD = "dp_shard"


def shard_mesh(world: World, replicas: int, shards: int) -> DeviceMesh:
    """The mesh FSDP2 cuts parameters over: one dimension with a single replica, else two."""
    if replicas == 1:
        return init_device_mesh(world.device.type, (shards,), mesh_dim_names=(SHARD,))
    return init_device_mesh(
        world.device.type, (replicas, shards), mesh_dim_names=(REPLICATE, SHARD)
    )
