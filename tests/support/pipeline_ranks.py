"""What each rank does for tests/olm_train/parallel/test_pipeline.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.expert_ranks import of_experts
from support.training import MODEL, build, digest, full, micro_batches
from torch import Tensor
from torch.distributed.tensor import DTensor

from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.parallel.config import PipelineParallelConfig
from olm_train.train_module import TransformerTrainModule

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "dualpipev")
LAYERS = 5
DENSE = replace(MODEL, n_layers=LAYERS)


@dataclass
class Trained:
    """What a run of three steps did; tensors are those of the whole model."""

    initial: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)


def world() -> World:
    return World(rank=dist.get_rank(), size=dist.get_world_size())


def piped(
    degree: int = 2, schedule: Any = "1f1b", strategy: str = "fsdp", **options: Any
) -> TransformerTrainModule:
    return build(
        strategy,
        world=world(),
        pp_config=PipelineParallelConfig(degree=degree, schedule=schedule),
        **{"model": DENSE, **options},
    )


def whole(module: TransformerTrainModule, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all stages, by name; every rank calls it."""
    own = {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors.items()}
    found: dict[str, Tensor] = {}
    for each in module.world.gather(own):
        found |= each
    return found


def weights(module: TransformerTrainModule) -> dict[str, Tensor]:
    return whole(module, module.state_dict()["model"])


def steps(
    module: TransformerTrainModule, rows: Sequence[int], numbers: Sequence[int] = (1, 2, 3)
) -> Trained:
    run = Trained(initial=digest(weights(module)))

    def look() -> None:
        named = module.model.named_parameters()
        run.gradients = whole(module, {n: p.grad for n, p in named if p.grad is not None})
        run.first = run.first or run.gradients

    module.gradients_ready = look
    for step in numbers:
        metrics = module.train_step(micro_batches(step, rows, module.world), step, 6)
        run.losses.append(float(metrics["train/CE loss"]))
        run.norms.append(float(metrics["optim/total grad norm"]))
    run.metrics = {name: float(value) for name, value in metrics.items()}
    run.weights = weights(module)
    return run
