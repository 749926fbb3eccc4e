"""What ranks do for the tests of the monitors, and a trainer that only takes steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.training import build, full, micro_batches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from olm_train.callbacks.base import Callback
from olm_train.distributed.world import World
from olm_train.extensions.monitors.gap_monitor import (
    GAPMonitorCallback,
    finish,
    measure,
    underflows_of,
)
from olm_train.extensions.monitors.gradient_files import write_gradients
from olm_train.extensions.monitors.gradient_noise_scale import GradientNoiseScaleCallback
from olm_train.train_module import TransformerTrainModule

TARGETS: Any = ["params", "grads", "updates", "opt_state", "activations", "activation_grads"]
KINDS: Any = ["max", "mean", "var", "rms", "zeros", "underflow", "ratio"]
LOSS = "train/CE loss"


class Steps:
    """As much of a trainer as callbacks of a step use."""

    def __init__(self, module: TransformerTrainModule, callbacks: Sequence[Callback]) -> None:
        self.train_module, self.world, self.step = module, module.world, 0
        self.callbacks, self.said = list(callbacks), []
        self.recorded: dict[str, float] = {}
        for each in callbacks:
            each.trainer = self  # type: ignore[assignment]

    def say(self, message: str) -> None:
        self.said.append(message)

    def record_metric(self, name: str, value: Any, *, reduce: Any = None) -> None:
        self.recorded[name] = float(value)

    def call(self, hook: str, *arguments: Any) -> None:
        for each in self.callbacks:
            getattr(each, hook)(*arguments)

    def run(self, rows: Sequence[int], steps: int = 2) -> list[dict[str, float]]:
        """Take steps; return their metrics as callbacks leave them."""
        self.call("pre_train")
        self.train_module.gradients_ready = lambda: self.call("post_backward")
        lines = []
        for step in range(1, steps + 1):
            batches = micro_batches(step, rows, self.world)
            self.call("pre_step", batches)
            metrics = self.train_module.train_step(batches, step, 6)
            self.step = step
            self.call("post_step")
            line = {name: float(value) for name, value in metrics.items()} | self.recorded
            self.call("pre_log_metrics", step, line)
            self.recorded = {}
            lines.append(line)
        self.call("close")
        return lines


def everything() -> list[Callback]:
    return [
        GAPMonitorCallback(interval=1, targets=TARGETS, kinds=KINDS),
        GradientNoiseScaleCallback(smoothing=0.5),
    ]


def sharded_statistics(shapes: Sequence[tuple[int, ...]], seed: int) -> bool:
    """Whether tensors of these shapes have the same statistics whole and sharded in each way."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    flat = init_device_mesh("cpu", (2,))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    generator = torch.Generator().manual_seed(seed)
    for scale, offset in ((1.0, 0.0), (1e-3, 1.0), (1e-39, 0.0)):
        tensors = [torch.randn(s, generator=generator) * scale + offset for s in shapes]
        for tensor in tensors:
            tensor.view(-1)[: tensor.numel() // 3] *= 0
        alone = World()
        under = underflows_of(tensors)
        expected = finish(measure(tensors, alone, underflows=under), alone)
        for tensor, mean, var in zip(tensors, expected.mean, expected.var, strict=True):
            exact = tensor.double()
            torch.testing.assert_close(mean, exact.mean(), rtol=1e-6, atol=0)
            if tensor.numel() > 1:
                torch.testing.assert_close(var, exact.var(), rtol=1e-6, atol=0)
        ways: list[tuple[Any, list[Any]]] = [(flat, [Shard(0)]), (flat, [Replicate()])]
        ways += [(mesh, [Replicate(), Shard(0)]), (flat, [Shard(max(map(len, shapes)) - 1)])]
        for device_mesh, placements in ways:
            cut = []
            for tensor in tensors:
                fits = [
                    Shard(min(p.dim, tensor.dim() - 1)) if p.is_shard() else p for p in placements
                ]
                cut.append(distribute_tensor(tensor, device_mesh, fits))
            under = underflows_of([each.to_local() for each in cut])
            found = finish(measure(cut, world, underflows=under), world)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=0, equal_nan=True)
    return True


def train_and_look(folder: str) -> dict[str, Any]:
    """Metrics and weights with and without looking, under each strategy; gradients on disk."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    results: dict[str, Any] = {}
    for strategy in ("fsdp", "ddp"):
        for name, callbacks in (("with", everything()), ("without", [])):
            module = build(strategy, world=world)
            lines = Steps(module, callbacks).run([1, 3])
            results[strategy, name] = lines, full(module)["model"]
        gradients = {name: p.grad for name, p in module.model.named_parameters()}
        for first_n in (None, 3):
            place = Path(folder) / f"{strategy}-{first_n}"
            write_gradients(place, 2, gradients, world, first_n)
        whole = {n: g.full_tensor() if strategy == "fsdp" else g for n, g in gradients.items()}
        results[strategy, "gradients"] = {name: g.clone() for name, g in whole.items()}
    return results


def same(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)
