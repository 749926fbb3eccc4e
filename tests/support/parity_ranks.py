"""What each rank does for tests/olm_train/parallel/test_parity.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.expert_ranks import of_experts
from support.training import MODEL, ROWS, Run, build, digest, full, load, micro_batches, save, train

from olm_train.distributed.world import World
from olm_train.model.parametrization import BaseConfig
from olm_train.model.shards import local_blocks
from olm_train.optim.dion import DionConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.config import (
    ContextParallelConfig,
    ExpertParallelConfig,
    PipelineParallelConfig,
    TensorParallelConfig,
)
from olm_train.train_module import TransformerTrainModule

CONTEXT = {"cp_config": ContextParallelConfig(degree=2)}
NEEDED = {"cp_config": ContextParallelConfig(degree=2, exchange="needed")}
EXPERTS = {"ep_config": ExpertParallelConfig(degree=2)}
PIPELINE = {"pp_config": PipelineParallelConfig(degree=2)}
TENSOR = {"tp_config": TensorParallelConfig(degree=2)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {},
    "hsdp": {"strategy": "hsdp", "sharing": {"num_replicas": 2}},
    "tp2": TENSOR,
    "cp2": CONTEXT,
    "pp2": PIPELINE,
    "ep2": EXPERTS,
    "tp2 x cp2": TENSOR | NEEDED,
    "tp2 x ep2": TENSOR | EXPERTS,
    "cp2 x ep2": NEEDED | EXPERTS,
    "pp2 x cp2": PIPELINE | CONTEXT,
    "pp2 x tp2": PIPELINE | TENSOR,
    "pp2 x ep2": PIPELINE | EXPERTS,
}
"""The ranks that are left share rows as `fsdp` does: of four, tp2 is fsdp2 x tp2."""
_BASE = BaseConfig(d_model=24, n_layers=3)
MODELS = {
    "dense": MODEL.changed(vocab_multiple=4, parametrization="completep", base=_BASE),
    "experts": of_experts().changed(vocab_multiple=4),
}
"""Dense ones with all that a parametrization multiplies, which no power of two does."""
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "in parts": {"parts": 2},
    "weighed": {"parts": 2, "weights": [3, 1, 700, 3, 1, 1, 700, 3]},
    "recomputed": {"ac_config": ActivationCheckpointingConfig(mode="full")},
    "both": {"ac_config": ActivationCheckpointingConfig(mode="selected_ops"), "parts": 2},
    "dion": {"optim": DionConfig(lr=1e-2)},
}
"""Activation checkpointing and accumulation, or whole matrices in the optimiser; a pipeline always
takes micro-batches of one row."""


def layouts_of(model: str, size: int) -> list[str]:
    """Names of layouts that a model and a number of ranks can have."""
    names = [name for name in LAYOUTS if model == "experts" or "ep2" not in name]
    return [name for name in names if size >= 4 or "x" not in name]


def of(layout: str | None, model: str, **options: Any) -> TransformerTrainModule:
    """A module in a layout of the ranks there are; None: of one rank."""
    if layout is None:
        return build(model=MODELS[model], **options)
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return build(world=world, model=MODELS[model], **LAYOUTS[layout], **options)


def rows_of(module: TransformerTrainModule, parts: int = 1) -> list[int]:
    """Rows of each micro-batch of this rank."""
    share = ROWS // module.world.readers
    if module.config.pp_config is not None:
        return [1] * share
    return [share] if parts == 1 else [1, share - 1]


def run_of(layout: str | None, model: str, how: str) -> Run:
    """Three steps."""
    options = dict(HOW[how])
    parts, weights = options.pop("parts", 1), options.pop("weights", ())
    module = of(layout, model, **options)
    batches = partial(micro_batches, weights=weights)
    return train(module, rows_of(module, parts), steps=[1, 2, 3], batches=batches)


def rest_of(module: TransformerTrainModule) -> Run:
    """The third and the fourth step."""
    return train(module, rows_of(module), steps=[3, 4])


def state_of(module: TransformerTrainModule) -> str:
    """Digest of weights and optimiser; every rank calls it."""
    state = full(module)
    return digest({f"{part}.{name}": each for part in state for name, each in state[part].items()})


def holds(module: TransformerTrainModule, state: dict[str, dict[str, torch.Tensor]]) -> bool:
    """Whether this rank's parts of weights and optimiser are those of a whole state, bit by bit."""
    return all(
        torch.equal(part.cpu(), state[kind][name][where])
        for kind, tensors in module.state_dict().items()
        for name, tensor in tensors.items()
        for part, where in local_blocks(tensor)
    )


def next_of(module: TransformerTrainModule) -> float:
    """The loss of the third step."""
    return train(module, rows_of(module), steps=[3]).losses[0]


def begun(layout: str | None, model: str, folder: Path, how: str = "plain") -> tuple[Run, Run]:
    """A run that is saved after two steps, and one that begins anew with what it saved."""
    module = of(layout, model, **HOW[how])
    train(module, rows_of(module), steps=[1, 2])
    save(module, folder / str(layout))
    straight, again = rest_of(module), of(layout, model, **HOW[how])
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    return straight, rest_of(load(again, folder / str(layout)))


def all_checks(folder: str, model: str, how: Sequence[str]) -> dict[Any, Any]:
    """Run every check on this rank; `folder` holds the checkpoint of one rank, and gets ours.

    Returns:
        "run", layout, how: three steps. "begun", layout; "begun", layout, how: see `begun`.
        "from", saved, layout: whether this rank's parts are right. "next", layout: the last layout
        that saved, the digest of what all ranks have from it, and the loss of the step after it.
    """
    results: dict[Any, Any] = {}
    names = layouts_of(model, dist.get_world_size())
    for name in names:
        for each in how:
            results["run", name, each] = run_of(name, model, each)
        results["begun", name] = begun(name, model, Path(folder))
        results["begun", name, "dion"] = begun(name, model, Path(folder) / "dion", "dion")
    alone = of(None, model)
    wholes = {saved: full(load(alone, Path(folder) / str(saved))) for saved in (None, *names)}
    for number, name in enumerate(names):
        module = of(name, model)
        for saved in (None, *names[number:], *names[:number]):
            load(module, Path(folder) / str(saved))
            results["from", saved, name] = holds(module, wholes[saved])
        results["next", name] = saved, state_of(module), next_of(module)
    return results
