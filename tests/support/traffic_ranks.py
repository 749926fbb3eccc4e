"""What each of four ranks sends in a step, for tests/olm_train/estimate/test_flops.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from support.batches import make_batch
from support.expert_ranks import of_experts
from support.parallel_checks import Traffic
from support.training import MODEL, build, micro_batches

from olm_train.distributed.world import World
from olm_train.estimate.traffic import traffic_of_step
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.config import (
    ContextParallelConfig,
    ExpertParallelConfig,
    PipelineParallelConfig,
    TensorParallelConfig,
)

FULL = {"ac_config": ActivationCheckpointingConfig(mode="full")}
WINDOW = MODEL.changed(attention={"sliding_window": (6, -1)})
NEEDED = ContextParallelConfig(degree=4, exchange="needed")
ULYSSES = ContextParallelConfig(degree=2, exchange="ulysses")
GATHER = {"cp_config": ContextParallelConfig(degree=2)}
TENSOR = {"tp_config": TensorParallelConfig(degree=2), "model": MODEL.changed(vocab_multiple=2)}
KEPT = {"sharing": {"reshard_after_forward": False}}
STAGES = {"pp_config": PipelineParallelConfig(degree=2), **KEPT}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {},
    "each": {"sharing": {"reduce_each_microbatch": True}},
    "kept": KEPT,
    "hsdp": {"strategy": "hsdp", "sharing": {"num_replicas": 2}},
    "gather": GATHER,
    "ddp, gather": {"strategy": "ddp", **GATHER},
    "ulysses": {"cp_config": ULYSSES, **FULL},
    "needed": {"cp_config": NEEDED, "model": WINDOW, "rank_microbatch_size": 96, **FULL},
    "tensor": TENSOR,
    "tensor, gather": TENSOR | GATHER,
    "pipeline": STAGES,
    "pipeline, tensor": STAGES | TENSOR,
    "experts": {"ep_config": ExpertParallelConfig(degree=2), "model": of_experts()},
}
"""Options of `build`."""


def sent() -> dict[str, tuple[int, int]]:
    """Return by layout the bytes that were sent and those that were foreseen."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    found = {}
    for name, options in LAYOUTS.items():
        sharers = [name for name in options if name in ("cp_config", "tp_config", "pp_config")]
        rows = 2 ** len(sharers)  # of each of two micro-batches
        options = {"rank_microbatch_size": 32 * rows, **options}
        module = build(world=world, **options)
        if name == "needed":  # what is foreseen is of whole rows
            batches = [make_batch([[32]] * 3, vocab_size=8)] * 2
        else:
            batches = micro_batches(1, [rows, rows], module.world)
        with Traffic() as traffic:
            module.train_step(batches, 1, 6)
        config = module.config
        foreseen = traffic_of_step(
            options.get("model", MODEL),
            config,
            world_size=world.size,
            micro_batches=2,
            sequence_length=32,
        )
        found[name] = sum(traffic.sent.values()), sum(foreseen.values())
    return found
