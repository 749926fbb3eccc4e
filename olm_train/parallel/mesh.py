"""Device meshes over the processes of a run. One dimension for now: data-parallel, "dp"."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from olm_train.world import World


def data_parallel_mesh(world: World) -> DeviceMesh:
    """The mesh over all ranks that FSDP2 cuts parameters over; one dimension, "dp"."""
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp",))
