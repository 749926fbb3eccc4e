"""What each of two or four ranks does for tests/olm_train/parallel/test_experts.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from support.training import MODEL, build, three_steps

from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.optim.muon import MuonConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig

EXPERTS: dict[str, Any] = {
    "name": "moe",
    "n_experts": 6,
    "top_k": 2,
    "hidden_size": 24,
    "shared_hidden_size": 16,
    "balance": {"name": "bias", "rate": 0.01},
    "z_loss": 1e-3,
}
BALANCES: dict[str, dict[str, Any]] = {
    "sequence_aux": {"balance": {"name": "sequence_aux", "weight": 0.1}},
    "global_aux": {
        "balance": {"name": "global_aux", "weight": 0.1},
        "scores": "sigmoid",
        "first_dense": 1,
        "dense_hidden_size": 40,
    },
}
"""Those beside that of `EXPERTS` that do not depend on how a step is cut."""
RECOMPUTED = {
    "kept": ActivationCheckpointingConfig(),
    "full": ActivationCheckpointingConfig(mode="full"),
    "ops": ActivationCheckpointingConfig(mode="selected_ops"),
}
MUON = MuonConfig(lr=1e-2)


def of_experts(**options: Any) -> DecoderConfig:
    return MODEL.changed(feed_forward=EXPERTS | options)


def all_checks() -> dict[str, Any]:
    """Run every check on this rank."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    share = 8 // world.size
    results: dict[str, Any] = {"muon": {}}
    for name, options in BALANCES.items():
        module = build("fsdp", world=world, model=of_experts(**options))
        results[name] = three_steps(module, [1, share - 1])
    few = of_experts(n_experts=world.size - 1, top_k=1)
    results["few"] = three_steps(build("fsdp", world=world, model=few), [share])
    for strategy in ("fsdp", "ddp"):
        module = build(strategy, world=world, model=of_experts(), optim=MUON)
        results["muon"][strategy] = three_steps(module, [share])
    return results
