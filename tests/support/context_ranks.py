"""What each of two or four ranks does for tests/olm_train/parallel/test_context.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from support.batches import make_batch
from support.expert_ranks import BALANCES, of_experts
from support.model_options import FAMILIES
from support.training import (
    LENGTHS,
    MODEL,
    ROWS,
    Run,
    build,
    cut,
    rows_refused,
    traced_alone,
    two_steps,
    watched,
)
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from olm_train.data.batch import Batch
from olm_train.data.dealing import ContextShare
from olm_train.distributed.world import World
from olm_train.extensions.any_model.torch_loader import TorchDataLoader
from olm_train.model.config import DecoderConfig
from olm_train.model.head import Head
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.config import ContextParallelConfig
from olm_train.train_module import TransformerTrainModule
from tests.olm_train.test_train_module import Syncs

EXCHANGES = ("gather", "needed", "ulysses")
CHUNK = 4
"""Tokens of a chunk here: documents, and rows, lie on several ranks."""
LONG = [[150, 3, 103], [256], [1] * 200 + [56], [256]]
SETS = {"documents": LENGTHS, "whole rows": [[32]] * ROWS, "long": LONG}
OTHER_SETS = ("whole rows", "long")
"""Those that the models have not read."""
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "math": {"attention": {"backend": "math", "qk_norm": "head"}},
    "window": {"attention": {"sliding_window": (6, -1)}},
    "full QK-norm": {"attention": {"qk_norm": "full"}, "block": "reordered_norm"},
    "softcap": {"attention": {"softcap": 2.0, "query_pre_attn_scalar": 12.0}},
    "shifted keys": {"attention": {"shift_keys": True, "qk_norm": None}},
}
QUICK = {
    "grouped": EXCHANGES, "window": ("gather", "needed"), "full QK-norm": ("ulysses",),
    "whole rows": ("needed",), "long": ("gather", "ulysses"),
    "full": ("gather",), "ops": ("needed", "ulysses"),
}  # fmt: skip
"""Models, data and recomputed activations of two ranks, each with some exchanges: all are met."""
FOUR = {
    **QUICK, "full QK-norm": ("gather", "ulysses"), "math": ("gather",), "softcap": ("needed",),
    "shifted keys": ("needed", "ulysses"),
    **{name: (EXCHANGES[n % 3],) for n, name in enumerate(FAMILIES)},
}  # fmt: skip
"""Of four ranks."""
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("gather", {}),
    "hsdp": ("needed", {"num_replicas": 2}),
    "ddp": ("ulysses", {}),
}
RECOMPUTED = {
    "full": ActivationCheckpointingConfig(mode="full"),
    "ops": ActivationCheckpointingConfig(mode="selected_ops"),
}


def of(name: str) -> DecoderConfig:
    """A model whose heads of keys four ranks can share."""
    return MODEL.changed(**{"n_heads": 8, "n_kv_heads": 4, **(MODELS | FAMILIES)[name]})


def batches(step: int, lengths: Sequence[Sequence[int]], parts: int, world: World) -> list[Batch]:
    """The rows of this rank's reader, in so many micro-batches, the first of one row if several."""
    whole = make_batch(lengths, vocab_size=8, seed=step)
    share = len(lengths) // world.readers
    first = world.reader * share
    ends = [first + share] if parts == 1 else [first + 1, first + share]
    return [at_random(cut(whole, a, b), world) for a, b in zip([first, *ends], ends, strict=False)]


def at_random(batch: Batch, world: World) -> Batch:
    """Deal chunks by chance: whoever has which, the results are the same."""
    order = torch.randperm(
        batch.input_ids.numel() // CHUNK, generator=torch.Generator().manual_seed(3)
    )
    return replace(batch, dealt=order.view(world.sharers, -1).sort(1).values)


def steps(module: TransformerTrainModule, data: str = "documents", parts: int = 1) -> Run:
    """Two steps, chunks dealt by chance."""

    def dealt(step: int, _: Sequence[int], world: World) -> list[Batch]:
        return batches(step, SETS[data], parts, world)

    return two_steps(module, [], batches=dealt)


def context(degree: int, exchange: str = "gather", **options: Any) -> dict[str, Any]:
    """Options of `build`."""
    cp = ContextParallelConfig(degree=degree, exchange=exchange)  # type: ignore[arg-type]
    return {"cp_config": cp, **options}


def all_checks(table: dict[str, tuple[str, ...]]) -> dict[Any, Any]:
    """Run every check on this rank, of `table` each with its exchanges."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    results: dict[Any, Any] = {}
    for name, exchange in [(each, exchange) for each in table for exchange in table[each]]:
        strategy, options = "fsdp", context(world.size, exchange)
        data, parts, model = "documents", 1, name
        if name in OTHER_SETS:
            strategy, data, model = "ddp", name, "window"
        if name in RECOMPUTED:
            options, parts, model = options | {"ac_config": RECOMPUTED[name]}, 2, "grouped"
        module = build(strategy, world=world, model=of(model), **options)
        results[name, exchange] = steps(module, data, parts)
    for exchange in EXCHANGES:
        results["apart", exchange] = _apart(world, exchange)
        results["no label", exchange] = _no_label(world, exchange)
    for balance, options in BALANCES.items():
        if balance != "sequence_aux":
            module = build(
                "fsdp", world=world, model=of_experts(**options), **context(world.size, "gather")
            )
            results["experts", balance] = steps(module, parts=2)
    grouped: dict[str, Any] = {"world": world, "model": of("grouped"), **context(world.size)}
    results["refused"] = rows_refused(build(**grouped))
    module = build(**grouped)
    results["seen"] = watched(module, batches(1, LENGTHS, 2, module.world))
    results["waits"] = [_waits(world, exchange) for exchange in EXCHANGES]
    results["torch"] = _torch(world)
    return results


def four_checks() -> dict[Any, Any]:
    """Run every check of this rank, one of four."""
    results = all_checks(FOUR)
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    for name, (exchange, sharing) in STRATEGIES.items():
        options = {"sharing": sharing, "model": of("window"), **context(2, exchange)}
        results[name] = steps(build(name, world=world, **options), parts=2)
    return results


@traced_alone()
def compiled_checks() -> dict[str, Run]:
    """Runs of compiled blocks, with a window and without."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return {
        exchange: steps(
            build(world=world, model=of("window"), **context(2, exchange, compile_model=True))
        )
        for exchange in EXCHANGES
    }


def _logits(module: TransformerTrainModule, batch: Batch) -> tuple[Tensor, Tensor]:
    """Places of this rank's tokens, and their logits."""
    (share,) = module._shares([batch])
    assert isinstance(share, ContextShare)
    with torch.no_grad():
        return share.own, share.through(module._forward, Head.logits)[0]


def _apart(world: World, exchange: str) -> dict[str, Any]:
    """Logits of this rank's tokens, and which of them another first document changes."""
    module = build("fsdp", world=world, model=of("window"), **context(world.size, exchange))
    batch = at_random(make_batch(LONG, vocab_size=8, seed=1), module.world)
    own, logits = _logits(module, batch)
    ids = batch.input_ids.clone()
    ids[0, :150] = (ids[0, :150] + 1) % 8
    changed = (_logits(module, replace(batch, input_ids=ids))[1] != logits).any(-1)
    return {"own": own, "logits": logits, "changed": own[changed]}


def _no_label(world: World, exchange: str) -> Run:
    """The last rank has the second row alone, in which no token has a label."""
    module = build("fsdp", world=world, model=of("grouped"), **context(world.size, exchange))
    batch = make_batch([[128 // world.size] * (world.size - 1) + [1] * (128 // world.size)],
                       vocab_size=8)  # fmt: skip
    dealt = torch.arange(2 * world.size).view(world.size, 2)
    metrics = module.train_step([replace(batch, dealt=dealt)], 1, 6)
    own = module._shares([replace(batch, dealt=dealt)])[0].labels
    return Run(
        losses=[float(metrics["train/CE loss"]), float(metrics["optim/total grad norm"])],
        metrics={"own labels": int((own >= 0).sum())},
    )


def _waits(world: World, exchange: str) -> dict[str, int]:
    """Operators of a step that make the host wait, where the loader has dealt the chunks."""
    module = build("fsdp", world=world, model=of("window"), **context(world.size, exchange))
    deal = module._deal
    assert deal is not None
    first, second = ([deal(b) for b in batches(n, LENGTHS, 2, module.world)] for n in (1, 2))
    assert bool(first[0].needs) == (exchange == "needed")
    module.train_step(first, 1, 6)
    with Syncs() as syncs:
        module.train_step(second, 2, 6)
    return dict(syncs.calls)


def _torch(world: World) -> tuple[float, int]:
    """A loader of torch that is told the module's world gives the ranks of a reader the same."""
    module = build("fsdp", world=world, model=of("grouped"), **context(2))
    rows = make_batch(LENGTHS, vocab_size=8)
    data = TensorDataset(rows.input_ids, rows.labels)
    here = module.world
    sampler = DistributedSampler(data, num_replicas=here.readers, rank=here.reader, shuffle=False)  # type: ignore[var-annotated]
    plain = DataLoader(data, batch_size=ROWS // here.readers, sampler=sampler)
    loader = TorchDataLoader(plain, world=here)
    metrics = module.train_step(next(iter(loader)), 1, 6)
    return float(metrics["train/CE loss"]), loader.global_batch_size
