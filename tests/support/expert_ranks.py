"""What each of two or four ranks does for tests/olm_train/parallel/test_experts.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.training import MODEL, build, digest, full, micro_batches, train
from torch import Tensor
from torch.distributed.tensor import DTensor

from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.optim.muon import MuonConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.train_module import TransformerTrainModule

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
STRATEGIES = ("ddp", "fsdp", "hsdp")
RECOMPUTED = {
    "kept": ActivationCheckpointingConfig(),
    "full": ActivationCheckpointingConfig(mode="full"),
    "ops": ActivationCheckpointingConfig(mode="selected_ops"),
}
Layout = tuple[str, str, int]
"""Strategy, what is recomputed, micro-batches of a rank."""
LAYOUTS = list(product(STRATEGIES, RECOMPUTED, (1, 2)))
SOME = [("ddp", "ops", 2), ("fsdp", "full", 1), ("hsdp", "kept", 2)]
"""Each of the options once."""
MUON = MuonConfig(lr=1e-2)


def of_experts(**options: Any) -> DecoderConfig:
    return MODEL.changed(feed_forward=EXPERTS | options)


@dataclass
class Trained:
    """What a run of three steps did."""

    initial: str = ""
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    counts: Tensor | None = None


def three_steps(module: TransformerTrainModule, rows: list[int]) -> Trained:
    """Losses of three steps; gradients, counts, biases and metrics of the last one."""
    run = Trained(initial=digest(full(module)["model"]))
    module.gradients_ready = lambda: run.gradients.update(
        {
            name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
            for name, p in module.model.named_parameters()
            if p.grad is not None
        }
    )
    for step in (1, 2, 3):
        metrics = module.train_step(micro_batches(step, rows, module.world), step, 6)
        run.losses.append(float(metrics["train/CE loss"]))
    run.metrics = {
        name: float(value)
        for name, value in metrics.items()
        if any(word in name for word in ("experts/", "balance", "router", "grad norm"))
    }
    assert module.experts is not None
    run.counts = module.world.sum(module.experts.counts)
    model = full(module)["model"]
    run.biases = {name: value for name, value in model.items() if name.endswith("router.bias")}
    return run


def assert_alike(run: Trained, expected: Trained, which: object = None) -> None:
    assert run.initial == expected.initial, which
    assert run.losses == pytest.approx(expected.losses, rel=1e-6), which
    assert run.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        far = (run.gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert far <= 1e-5, (which, name)
    assert run.biases.keys() == expected.biases.keys()
    for name, bias in expected.biases.items():
        assert torch.equal(run.biases[name], bias), (which, name)
    assert run.counts is not None
    assert expected.counts is not None
    assert torch.equal(run.counts, expected.counts), which
    assert run.metrics == pytest.approx(expected.metrics, rel=1e-5), which


def all_checks(folder: str, layouts: list[Layout]) -> dict[str, Any]:
    """Run every check on this rank; `folder` holds a checkpoint of one rank, and gets ours."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    share = 8 // world.size
    results: dict[str, Any] = {"layouts": {}, "balances": {}, "muon": {}}
    for strategy, recomputed, cuts in layouts:
        module = build(
            strategy,
            world=world,
            model=of_experts(),
            sharing={"num_replicas": 2} if strategy == "hsdp" else {},
            ac_config=RECOMPUTED[recomputed],
        )
        found = three_steps(module, [share] if cuts == 1 else [1, share - 1])
        results["layouts"][strategy, recomputed, cuts] = found
    for name, options in BALANCES.items():
        module = build("fsdp", world=world, model=of_experts(**options))
        results["balances"][name] = three_steps(module, [1, share - 1])
    few = of_experts(n_experts=world.size - 1, top_k=1)
    results["few"] = three_steps(build("fsdp", world=world, model=few), [share])
    for strategy in {strategy for strategy, _, cuts in layouts if cuts == 1} - {"hsdp"}:
        module = build(strategy, world=world, model=of_experts(), optim=MUON)
        results["muon"][strategy] = train(module, [share])
    module = build("fsdp", world=world, model=of_experts(), param_dtype="bfloat16")
    results["bfloat16"] = three_steps(module, [share])
    results["resumed"] = _resumed(world, Path(folder))
    return results


def _resumed(world: World, folder: Path) -> dict[str, Any]:
    """A run that goes on from what one rank saved, and one that is interrupted here."""
    share = 8 // world.size
    module = build("fsdp", world=world, model=of_experts())
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder / "one")
    module.load_state_dict(state)
    loaded = digest(full(module)["model"])
    from_one = train(module, [share], steps=[3, 4])
    whole = train(build("fsdp", world=world, model=of_experts()), [share], steps=[1, 2, 3, 4])
    module = build("fsdp", world=world, model=of_experts())
    train(module, [share], steps=[1, 2])
    dcp.save(module.state_dict(), checkpoint_id=folder / "here")
    module = build("fsdp", world=world, model=of_experts())
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.zero_()
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder / "here")
    module.load_state_dict(state)
    rest = train(module, [share], steps=[3, 4])
    return {
        "loaded": loaded,
        "losses": from_one.losses,
        "same": (rest.losses, digest(rest.weights)) == (whole.losses[2:], digest(whole.weights)),
    }
