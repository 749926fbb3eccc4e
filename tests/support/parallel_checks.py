"""What each of two ranks does for tests/olm_train/parallel/test_apply.py; results by name.

They stand here, and run in one call, because starting processes is what costs time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from support.model_options import FAMILIES
from support.training import MODEL, build, digest, full, micro_batches, train, two_steps
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from olm_train.distributed.world import World
from olm_train.model.decoder import Decoder
from olm_train.model.loss_config import LossConfig
from olm_train.optim.adamw import AdamWConfig, SkipStepAdamWConfig
from olm_train.optim.dion import DionConfig
from olm_train.optim.lion import LionConfig, SkipStepLionConfig
from olm_train.optim.muon import MuonConfig
from olm_train.parallel.apply import parallelize
from olm_train.train_module import TransformerTrainModule

OPTIMIZERS = {
    "muon": MuonConfig(lr=1e-2),
    "dion": DionConfig(lr=1e-2),
    "lion": LionConfig(lr=1e-3),
    "skip_step_adamw": SkipStepAdamWConfig(lr=1e-2, rolling_interval_length=4, sigma_factor=0.1),
    "skip_step_lion": SkipStepLionConfig(lr=1e-3, rolling_interval_length=4, sigma_factor=0.1),
}
"""The last two leave out steps of an ordinary run."""
HALF = AdamWConfig(lr=5e-3, dtype="bfloat16")
CHUNKED = LossConfig(name="chunked", chunk_size=10)


def all_checks() -> dict[str, Any]:
    """Run every check on this rank."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    results: dict[str, Any] = {}
    for strategy, sharing in (("fsdp", {}), ("hsdp", {"num_replicas": 2})):
        each = sharing | {"reduce_each_microbatch": True}
        module = build(strategy, world=world, sharing=each)
        results[strategy, "each"] = two_steps(module, [1, 1, 1, 1])
        results[strategy, "each traffic"] = _traffic(strategy, world, sharing=each)
        each |= {"cpu_offload": True}
        module = build(strategy, world=world, sharing=each)
        results[strategy, "each offloaded"] = two_steps(module, [1, 1, 1, 1])
    for strategy in ("fsdp", "ddp"):
        results[strategy, "bfloat16"] = two_steps(
            build(strategy, world=world, param_dtype="bfloat16"), [2, 2]
        )
        results[strategy, "chunked"] = two_steps(build(strategy, world=world, loss=CHUNKED), [2, 2])
        results[strategy, "traffic"] = _traffic(strategy, world)
        results[strategy, "chunked traffic"] = _traffic(strategy, world, loss=CHUNKED)
        results[strategy, "non-finite"] = _non_finite(strategy, world)
        results[strategy, "whole state fits"] = _whole_state_fits(strategy, world)
        results[strategy, "eval"] = _evaluate(strategy, world)
        results[strategy, "half"] = two_steps(build(strategy, world=world, optim=HALF), [2, 2])
    for name, optim in OPTIMIZERS.items():
        module = build("fsdp", world=world, optim=optim)
        results["optim", name] = train(module, [2, 2], steps=[1, 2, 3, 4])
    for name, change in FAMILIES.items():
        model = MODEL.changed(**change)
        results["fsdp", name] = two_steps(build("fsdp", world=world, model=model), [2, 2])
    tied = MODEL.changed(**FAMILIES["GPT-2"])  # DDP wraps whatever it is given
    results["ddp", "GPT-2"] = two_steps(build("ddp", world=world, model=tied), [2, 2])
    results["shares"] = _shares(world)
    return results


class Traffic(TorchDispatchMode):
    """Counts collectives by the name of their operator; `order` gets the names one by one.

    An all-gather is named with the number of ranks it is over. `sent` counts bytes by that number:
    what a ring of these ranks sends of each tensor of more than `LEAST` bytes.
    """

    LEAST = 64

    def __init__(self, order: list[str] | None = None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._order = [] if order is None else order
        self.sent: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "c10d" in func.namespace:
            name = func._opname
            if name == "_allgather_base_":
                name += f" of {args[0].numel() // args[1].numel()}"
            self.calls[name] += 1
            self._order.append(name)
            self._send(name, *args)
        return func(*args, **(kwargs or {}))

    def _send(self, name: str, tensors: Any, given: Any, group: Any = None, *rest: Any) -> None:
        """Count the bytes of a call."""
        if name == "allreduce_":
            size, whole = dist.ProcessGroup.unbox(given).size(), 2 * tensors[0].nbytes
        elif name == "send":
            self.sent[2] += tensors[0].nbytes
            return
        elif name == "alltoall_base_" and rest[1]:  # parts of other sizes
            ranks = dist.ProcessGroup.unbox(group)
            stays = rest[1][ranks.rank()] / max(sum(rest[1]), 1)
            self.sent[ranks.size()] += round(given.nbytes * (1 - stays))
            return
        elif name in ("broadcast_", "allgather_", "barrier", "recv_"):
            return
        else:
            size, whole = dist.ProcessGroup.unbox(group).size(), max(tensors.nbytes, given.nbytes)
        if whole > self.LEAST:
            self.sent[size] += whole * (size - 1) // size


def _traffic(strategy: str, world: World, **options: Any) -> dict[str, int]:
    """Collectives of one step of four micro-batches, by kind."""
    module = build(strategy, world=world, **options)
    with Traffic() as traffic:
        module.train_step(micro_batches(1, [1, 1, 1, 1], world), 1, 6)
    return dict(traffic.calls)


def _non_finite(strategy: str, world: World) -> dict[str, Any]:
    """One rank alone sees a NaN; what did each do?"""
    module = build(strategy, world=world)
    before = digest(full(module)["model"])
    batches = micro_batches(3, [2, 2], world)
    if world.rank == 1:
        module.model.norm.register_forward_hook(lambda _m, _args, out: out * float("nan"))
    metrics = module.train_step(batches, 3, 6)
    return {
        "bad": float(metrics["optim/non-finite"]),
        "unchanged": digest(full(module)["model"]) == before,
    }


def _whole_state_fits(strategy: str, world: World) -> bool:
    """Whether a state of whole tensors comes to lie on the ranks as it is."""
    module, other = build(strategy, world=world), build(strategy, world=world)
    train(module, [2, 2], steps=[1])
    other.load_state_dict(full(module))
    return full_digests(other) == full_digests(module)


def full_digests(module: TransformerTrainModule) -> dict[str, str]:
    return {part: digest(tensors) for part, tensors in full(module).items()}


def _evaluate(strategy: str, world: World) -> tuple[float, int, bool]:
    """Loss, labels, and whether the state after it is, name for name, the state before it."""
    module = build(strategy, world=world)
    (batch,) = micro_batches(1, [4], world)
    before = full_digests(module)
    kinds = {name: type(tensor) for name, tensor in module.state_dict()["model"].items()}
    loss, count = module.eval_batch(batch)
    same = kinds == {name: type(x) for name, x in module.state_dict()["model"].items()}
    same &= before == full_digests(module)
    return float(world.sum(loss)), int(world.sum(count)), same


def _shares(world: World) -> dict[str, bool]:
    """How the parameters lie on this rank under FSDP2."""
    module = build("fsdp", world=world)
    sharded = [p for p in module.model.parameters() if isinstance(p, DTensor)]
    model: Decoder = Decoder(MODEL, device="meta")
    wrapped = parallelize(model, build("ddp", world=world).config.dp_config, world)
    return {
        "all sharded": len(sharded) == len(list(module.model.parameters())),
        "half here": sum(p.to_local().numel() for p in sharded) < 0.52 * MODEL.num_params,
        "master weights fp32": all(p.dtype == torch.float32 for p in sharded),
        "ddp wraps the model": wrapped.module is model,
    }
