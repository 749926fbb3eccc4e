"""What each of four ranks sends in a step, for tests/olm_train/estimate/test_traffic.py."""

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

FULL = ActivationCheckpointingConfig(mode="full")
WINDOW = MODEL.changed(attention={"sliding_window": (6, -1)})
NEEDED = ContextParallelConfig(degree=4, exchange="needed")
ULYSSES = ContextParallelConfig(degree=2, exchange="ulysses")
EVEN = MODEL.changed(vocab_multiple=2)
STAGES = PipelineParallelConfig(degree=2)
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ddp": ("ddp", {}, {}),
    "fsdp": ("fsdp", {}, {}),
    "each": ("fsdp", {"reduce_each_microbatch": True}, {}),
    "kept": ("fsdp", {"reshard_after_forward": False}, {}),
    "hsdp": ("hsdp", {"num_replicas": 2}, {}),
    "gather": ("fsdp", {}, {"cp_config": ContextParallelConfig(degree=2)}),
    "ddp, gather": ("ddp", {}, {"cp_config": ContextParallelConfig(degree=2)}),
    "ulysses": ("fsdp", {}, {"cp_config": ULYSSES, "ac_config": FULL}),
    "needed": (
        "fsdp",
        {},
        {"cp_config": NEEDED, "ac_config": FULL, "model": WINDOW, "rank_microbatch_size": 96},
    ),
    "tensor": ("fsdp", {}, {"tp_config": TensorParallelConfig(degree=2), "model": EVEN}),
    "tensor, gather": (
        "fsdp",
        {},
        {
            "tp_config": TensorParallelConfig(degree=2),
            "cp_config": ContextParallelConfig(degree=2),
            "model": EVEN,
        },
    ),
    "pipeline": ("fsdp", {"reshard_after_forward": False}, {"pp_config": STAGES}),
    "pipeline, tensor": (
        "fsdp",
        {"reshard_after_forward": False},
        {"pp_config": STAGES, "tp_config": TensorParallelConfig(degree=2), "model": EVEN},
    ),
    "experts": ("fsdp", {}, {"ep_config": ExpertParallelConfig(degree=2), "model": of_experts()}),
}


def sent(_: str) -> dict[str, tuple[int, int]]:
    """Return by layout the bytes that were sent and those that were foreseen."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    found = {}
    for name, (strategy, sharing, options) in LAYOUTS.items():
        sharers = [name for name in options if name in ("cp_config", "tp_config", "pp_config")]
        rows = 2 ** len(sharers)  # of each of two micro-batches
        options = {"rank_microbatch_size": 32 * rows, **options}
        module = build(strategy, world=world, sharing=sharing, **options)
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
