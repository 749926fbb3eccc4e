"""What each rank does for tests/olm_train/parallel/test_pipeline.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.batches import make_batch
from support.dealt_ranks import OPTIMS
from support.expert_ranks import BALANCES, of_experts
from support.training import (
    LENGTHS,
    MODEL,
    Run,
    build,
    cut,
    digest,
    full,
    load,
    micro_batches,
    save,
    three_steps,
    train,
    weights,
)
from torch import Tensor

from olm_data.errors import OlmError
from olm_data.storage.store import Store
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import CheckpointManifest
from olm_train.data.batch import Batch
from olm_train.distributed.waiting import RanksLostError, RankWatchdog
from olm_train.distributed.world import World
from olm_train.model.decoder import build_decoder
from olm_train.model.init import init_parameters
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.groups import GroupOverride
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.config import (
    ExpertParallelConfig,
    PipelineParallelConfig,
    PipelineSchedule,
    TensorParallelConfig,
)
from olm_train.train_module import TransformerTrainModule

SCHEDULES: tuple[PipelineSchedule, ...] = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "zero_bubble",
    "dualpipev",
)
QUICK: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved_1f1b", "dualpipev")
DENSE = replace(MODEL, n_layers=5)
EVEN = DENSE.changed(vocab_multiple=2)
EXPERTS = {name: replace(of_experts(**how), n_layers=4) for name, how in BALANCES.items()}
KEPT = {"reshard_after_forward": False}
FULL = ActivationCheckpointingConfig(mode="full")
LIMIT = GroupOverride(params=["norm.weight", "blocks.0.*"], opts={"max_grad_norm": 0.01})
NAMED = {
    **OPTIMS,
    "half": AdamWConfig(lr=1e-2, dtype="bfloat16"),
    "limit": AdamWConfig(lr=1e-2, group_overrides=[LIMIT]),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "hsdp": {"strategy": "hsdp", "sharing": {"shard_degree": 1}},
    "pp4": {"degree": 4},
    "offload": {"sharing": {"cpu_offload": True, "prefetch_factor": 1}},
    "zero bubble": {"schedule": "zero_bubble", "sharing": KEPT},
    "interleaved, recomputed": {"schedule": "interleaved_1f1b", "ac_config": FULL},
}
"""Of four ranks."""


def world() -> World:
    if not dist.is_initialized():
        return World()
    return World(rank=dist.get_rank(), size=dist.get_world_size())


def piped(
    degree: int = 2,
    schedule: PipelineSchedule = "1f1b",
    strategy: str = "fsdp",
    *,
    points: list[int] | None = None,
    **options: Any,
) -> TransformerTrainModule:
    pipeline = PipelineParallelConfig(degree=degree, schedule=schedule, split_points=points)
    return build(strategy, world=world(), pp_config=pipeline, **{"model": DENSE, **options})


def batches(module: TransformerTrainModule, step: int, rows: int = 1) -> list[Batch]:
    """This rank's part of a global batch of 8 rows, `rows` a micro-batch."""
    each = 8 // module.world.readers // rows
    return micro_batches(step, [rows] * each, module.world)


def steps(module: TransformerTrainModule, rows: int = 1) -> Run:
    """Three steps."""
    return three_steps(module, [rows] * (8 // module.world.readers // rows))


def evaluated(
    module: TransformerTrainModule, lengths: list[list[int]]
) -> tuple[float, list[Tensor]]:
    """Losses of labels of a batch of this rank's own, of a shape of its own."""
    batch = make_batch(lengths, vocab_size=8, seed=3)
    total, _ = module.eval_batch(batch)
    return float(total), [module.eval_losses(batch), module.eval_losses(batch, fp32_logits=True)]


def two_checks(folder: str) -> dict[Any, Any]:
    """Run every check of this rank, one of two; `folder` holds a checkpoint of one rank."""
    results: dict[Any, Any] = {}
    module = piped(schedule="zero_bubble")
    mine = LENGTHS[:2] if world().rank else LENGTHS[2:5]
    results["evaluated"] = evaluated(module, mine)
    results["held"] = [*dict(module.model.named_parameters())]
    results["zero_bubble"] = steps(module)
    for schedule in QUICK:
        results[schedule] = steps(piped(schedule=schedule))
    results["global_aux"] = steps(piped(model=EXPERTS["global_aux"]))
    results["resumed"] = resumed(Path(folder))
    results["seen"] = seen(piped(schedule="zero_bubble"))
    results["non-finite"] = non_finite()
    results["refused"] = refused()
    results["lost"] = lost()  # the last one: the group is broken after it
    return results


def slow_checks() -> dict[Any, Any]:
    """More of one of two ranks."""
    results: dict[Any, Any] = {}
    results["gpipe"] = steps(piped(schedule="gpipe"))
    results["recomputed", "dualpipev"] = steps(piped(schedule="dualpipev", ac_config=FULL))
    results["split"] = steps(piped(points=[1]))
    for name, optim in NAMED.items():
        results["optim", name] = steps(piped(schedule="interleaved_1f1b", optim=optim))
    for name, model in EXPERTS.items():
        for schedule in SCHEDULES[1:]:
            results["experts", name, schedule] = steps(piped(schedule=schedule, model=model))
    results["gpipe of few"] = steps(piped(schedule="gpipe"), rows=8)
    results["zero bubble of few"] = steps(piped(schedule="zero_bubble"), rows=8)
    for mode in ("full", "selected_ops"):
        ac = ActivationCheckpointingConfig(mode=mode)
        results["recomputed", mode] = steps(piped(ac_config=ac))
    decoder = build_decoder(DENSE)
    init_parameters(decoder, 5 + world().rank)  # rank 0's are taken
    pipeline = PipelineParallelConfig(degree=2)
    config = replace(piped().config, pp_config=pipeline)
    results["a decoder"] = steps(TransformerTrainModule(config, decoder, seed=1, world=world()))
    results["compiled"] = steps(piped(compile_model=True))
    return results


def four_checks() -> dict[Any, Any]:
    """Run every check of this rank, one of four."""
    results: dict[Any, Any] = {}
    for name, options in LAYOUTS.items():
        results[name] = steps(piped(**options))
    dealt = ExpertParallelConfig(degree=2)
    results["dealt"] = steps(piped(model=EXPERTS["sequence_aux"], ep_config=dealt))
    results["muon"] = steps(piped(optim=OPTIMS["muon"]))
    results["evaluated"] = evaluated(piped(schedule="interleaved_1f1b"), LENGTHS[:2])
    tensor = {"model": EVEN, "tp_config": TensorParallelConfig(degree=2)}
    cut = piped(schedule="dualpipev", sharing=KEPT, **tensor)
    results["cut, evaluated"] = evaluated(cut, LENGTHS[world().rank : world().rank + 2])
    results["cut"] = steps(cut)
    results["cut, seen"] = seen(cut)
    return results


def lost() -> str:
    """What the first of two ranks says where the other one does not come to the second step."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if world().main else None
    (port, *_) = world().gather(store.port if store else None)
    store = store or dist.TCPStore("127.0.0.1", port)
    module = piped()
    given = replace(module.world, store=store)
    waiting = RankWatchdog(given, module.model, timeout=3, grace=timedelta(seconds=1))
    module.train_step(batches(module, 1), 1, 6)
    waiting.reached(1)
    given.barrier()
    if given.rank:
        store.wait(["over"], timedelta(minutes=10))
        return ""
    try:
        with waiting:
            module.train_step(batches(module, 2), 2, 6)
    except RanksLostError as error:
        return str(error)
    finally:
        store.set("over", "")
    return "the step was taken"


def resumed(folder: Path) -> dict[str, Any]:
    """A run of looped stages that is interrupted, and what is given to one of its own."""
    schedule: PipelineSchedule = "interleaved_1f1b"
    module = piped(schedule=schedule)
    rows = [1] * (8 // module.world.readers)
    train(module, rows, (1, 2))
    save(module, folder / "here")
    values = saved_values(module, folder / "values")
    given, other = full(module), piped()
    other.load_state_dict({"model": given["model"]})
    straight, again = train(module, rows, (3, 4)), piped(schedule=schedule)
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    rest = train(load(again, folder / "here"), rows, (3, 4))
    return {
        "same": rest.bits == straight.bits,
        "given": weights(other) == digest(given["model"]),
        "values": values,
        "from one": train(load(other, folder / "one"), rows, (3, 4)),
    }


def saved_values(module: TransformerTrainModule, folder: Path) -> list[str]:
    """Names of plain values of the optimiser that a checkpoint holds."""
    for state in module.optimizer.state.values():
        state["calls"] = 2
    save(module, folder)
    for state in module.optimizer.state.values():
        del state["calls"]
    store = Store(folder / "step00000002")
    return [*Checkpoint(store, CheckpointManifest.read(store)).index.values]


def seen(module: TransformerTrainModule) -> list[tuple[Tensor, Tensor]]:
    """Rows and losses of labels that `watch_losses` is shown."""
    found = list[tuple[Tensor, Tensor]]()
    module.watch_losses = lambda batch, by_label: found.append((batch.rows, by_label))
    module.train_step(batches(module, 1), 1, 6)
    return found


def non_finite() -> dict[str, Any]:
    """The first stage alone makes a NaN; what did each rank do, and after it?"""
    module = piped(non_finite="skip")
    before = weights(module)
    block = next(block for block in module.model.blocks if block is not None)
    first = module.world.rank == 0
    handle = block.feed_forward.register_forward_hook(
        lambda _m, _args, out: out * (float("nan") if first else 1.0)
    )
    bad = float(module.train_step(batches(module, 1), 1, 6)["optim/non-finite"])
    unchanged = weights(module) == before
    handle.remove()
    good = module.train_step(batches(module, 2), 2, 6)
    return {"bad": bad, "unchanged": unchanged, "loss": float(good["train/CE loss"])}


def refused() -> dict[str, str]:
    """What steps are refused with."""
    module = piped()
    uneven = micro_batches(1, [1, 7], module.world)
    other = make_batch(LENGTHS, vocab_size=8, seed=module.world.rank)
    found = {}
    for name, given in {
        "few": batches(module, 1, rows=8),
        "uneven": uneven,
        "rows": [cut(other, n, n + 1) for n in range(8)],
    }.items():
        module._compared = name != "rows"
        try:
            module.train_step(given, 1, 6)
        except OlmError as error:
            found[name] = str(error)
    return found
