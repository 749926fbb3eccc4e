"""What each of some ranks does for tests/olm_train/parallel/test_expert_parallel.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.batches import make_batch
from support.context_ranks import context
from support.expert_ranks import BALANCES, MUON, RECOMPUTED, of_experts
from support.parallel_checks import OPTIMIZERS, Traffic
from support.training import Run, after_a_nan, build, micro_batches, traced_alone, two_steps
from torch import Tensor
from torch.distributed.tensor import DTensor

from olm_train.distributed.world import World
from olm_train.model.mixture import Experts, Router
from olm_train.model.shards import local_part
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.given import NamedOptim
from olm_train.optim.groups import GroupOverride
from olm_train.parallel.config import ExpertParallelConfig
from olm_train.parallel.exchange import both_ways, send_rows
from olm_train.train_module import TransformerTrainModule

OPTIMS = {
    **OPTIMIZERS,
    "muon": MUON,
    "sgd": NamedOptim.of("torch.optim:SGD", torch.optim.SGD, {"lr": 1e-2, "foreach": True}),
    "foreach": NamedOptim.of("torch.optim:NAdam", torch.optim.NAdam, {"lr": 1e-2, "foreach": True}),
    "limit": AdamWConfig(
        lr=1e-2,
        group_overrides=[GroupOverride(params=["*.experts.*"], opts={"max_grad_norm": 0.01})],
    ),
}
"""The last one clips experts by their own norm."""
ODD = [[5, 6], [11], [1, 10], [1] * 11]
"""Rows that are no multiple of anything."""


def sharing(strategy: str) -> dict[str, Any]:
    copies = 2 if dist.get_world_size() > 2 else 1
    return {"num_replicas": copies} if strategy == "hsdp" else {}


def dealt(degree: int = 2, strategy: str = "fsdp", **options: Any) -> TransformerTrainModule:
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    module: TransformerTrainModule = build(
        strategy,
        world=world,
        ep_config=ExpertParallelConfig(degree=degree),
        **{"model": of_experts(), "sharing": sharing(strategy), **options},
    )
    return module


def whole(strategy: str = "fsdp", **options: Any) -> TransformerTrainModule:
    """Each rank computes with all experts."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return build(strategy, world=world, **{"model": of_experts(), **options})


def to_one_expert(module: TransformerTrainModule) -> TransformerTrainModule:
    """Let each token choose the first expert first, whatever its score."""
    for each in module.model.modules():
        if isinstance(each, Router):
            assert each.bias is not None
            each.bias[0] = 10.0
    return module


def odd_steps(module: TransformerTrainModule) -> list[float]:
    """Losses of steps on rows of odd lengths, one row a micro-batch."""
    world, losses = module.world, []
    for step in (1, 2):
        share = len(ODD) // world.size
        rows = range(world.rank * share, (world.rank + 1) * share)
        batches = [make_batch([ODD[row]], vocab_size=8, seed=step + row) for row in rows]
        losses.append(float(module.train_step(batches, step, 6)["train/CE loss"]))
    return losses


def all_checks(optims: Sequence[str]) -> dict[Any, Any]:
    """Run every check on this rank."""
    size = dist.get_world_size()
    share = 8 // size
    results: dict[Any, Any] = {"balances": {}}
    results["hsdp"] = two_steps(dealt(2, "hsdp"), [1, share - 1])
    for name, options in BALANCES.items():
        for way in (dealt, whole):
            module = way(model=of_experts(**options))
            results["balances"][name, way.__name__] = two_steps(module, [1, share - 1])
    few = whole(model=of_experts(n_experts=size - 1, top_k=1))
    results["few"] = two_steps(few, [share])
    for strategy in ("fsdp", "ddp"):
        results["optim", strategy] = two_steps(whole(strategy, optim=MUON), [share])
    each = of_experts(n_experts=size, top_k=1)
    results["one each"] = two_steps(dealt(size, model=each), [share])
    lonely = to_one_expert(dealt(model=of_experts(top_k=1)))
    rows = results["rows of products"] = set[int]()
    for each in lonely.model.modules():
        if isinstance(each, Experts):
            each.register_forward_pre_hook(lambda _m, args: rows.add(len(args[0])))
    results["one for all"] = two_steps(lonely, [share])
    results["transposed"] = _transposed()
    results["odd"] = odd_steps(dealt())
    small = of_experts(capacity_factor=0.7)
    results["capacity"] = [two_steps(way(model=small), [share]) for way in (dealt, whole)]
    for name in optims:
        results["optim", name] = two_steps(dealt(optim=OPTIMS[name]), [share])
    results["bfloat16"] = two_steps(dealt(param_dtype="bfloat16"), [share])
    module = dealt(non_finite="skip")
    batches = partial(micro_batches, rows=[share], world=module.world)
    here = module.world.rank == 1
    results["non-finite"] = after_a_nan(module, module.model.norm, here, batches)
    results["held"] = _held()
    results["traffic"] = {name: _traffic(name) for name in RECOMPUTED}
    return results


def four_checks() -> dict[Any, Any]:
    """Run every check of this rank, one of four."""
    results = all_checks(list(OPTIMS))
    for degree in (2, 4):
        module = dealt(degree, model=of_experts(n_experts=8), **context(2))
        results["context", degree] = two_steps(module, [2, 2])
    offload = {"cpu_offload": True, "prefetch_factor": 1}
    results["offload"] = two_steps(dealt(2, sharing=offload), [2])
    return results


def eight_checks() -> dict[Any, Any]:
    """Run every check of this rank, one of eight: each axis has two."""
    return {
        "hsdp": two_steps(dealt(2, "hsdp"), [1]),
        "context": two_steps(dealt(2, "hsdp", **context(2)), [2]),
        "muon": two_steps(dealt(2, "hsdp", optim=MUON), [1]),
    }


@traced_alone()
def compiled_checks() -> Run:
    """A run of compiled blocks."""
    return two_steps(dealt(param_dtype="bfloat16", compile_model=True), [4])


def _held() -> dict[str, Any]:
    """Shapes of what this rank has of each parameter, and the bytes of optimiser state."""
    module = dealt()
    named = module.model.named_parameters()
    found: dict[str, Any] = {
        name: tuple(p.to_local().shape) for name, p in named if isinstance(p, DTensor)
    }
    states = [each for state in module.optimizer.state.values() for each in state.values()]
    found["state"] = sum(each.nbytes for each in map(local_part, states))
    return found


def _transposed() -> tuple[Tensor, Tensor]:
    """Gradient of what is sent around, of one that lies column by column; and what it should be."""
    size, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    weight = torch.arange(6.0 * size).view(3, 2 * size)
    sent = torch.zeros(2 * size, 3, requires_grad=True)
    each = [2] * size

    def way(x: Tensor) -> Tensor:
        return send_rows(x, each, each, group)

    got = both_ways(sent, way, way)
    (got.T * weight).sum().backward()
    assert sent.grad is not None
    first = 2 * dist.get_rank()
    return sent.grad, weight.T[first : first + 2].repeat(size, 1)


def _traffic(recomputed: str) -> int:
    """Exchanges of tokens, and of their counts, of a step."""
    module = dealt(ac_config=RECOMPUTED[recomputed])
    share = 8 // module.world.size
    with Traffic() as traffic:
        module.train_step(micro_batches(1, [share], module.world), 1, 6)
    return int(traffic.calls["alltoall_base_"])
