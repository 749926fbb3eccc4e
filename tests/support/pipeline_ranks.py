"""What each rank does for tests/olm_train/parallel/test_pipeline.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
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
    after_a_nan,
    build,
    cut,
    digest,
    full,
    load,
    lost,
    micro_batches,
    save,
    train,
    two_steps,
    watched,
    weights,
)
from torch import Tensor

from olm_data.errors import OlmError
from olm_data.storage.store import Store
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import CheckpointManifest
from olm_train.data.batch import Batch
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

QUICK: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved_1f1b", "dualpipev")
DENSE = replace(MODEL, n_layers=5)
EVEN = DENSE.changed(vocab_multiple=2)
EXPERTS = {name: replace(of_experts(**how), n_layers=4) for name, how in BALANCES.items()}
KEPT = {"reshard_after_forward": False}
FULL = ActivationCheckpointingConfig(mode="full")
LIMIT = GroupOverride(params=["norm.weight", "blocks.0.*"], opts={"max_grad_norm": 0.01})
NAMED = {
    **{name: OPTIMS[name] for name in ("dion", "skip_step_lion", "sgd")},
    "half": AdamWConfig(lr=1e-2, dtype="bfloat16"),
    "limit": AdamWConfig(lr=1e-2, group_overrides=[LIMIT]),
}
Case = tuple[dict[str, Any], dict[str, Any]]
"""Options of `piped` alone, and those of one rank too; of few micro-batches those that say so."""
TWO: dict[str, Case] = {
    **{schedule: ({"schedule": schedule}, {}) for schedule in QUICK},
    "experts": ({}, {"model": EXPERTS["global_aux"]}),
}
SLOW: dict[str, Case] = {
    "gpipe": ({"schedule": "gpipe"}, {}),
    "gpipe of few": ({"schedule": "gpipe"}, {}),
    "zero bubble of few": ({"schedule": "zero_bubble"}, {}),
    "split": ({"points": [1]}, {}),
    "recomputed": ({}, {"ac_config": FULL}),
    "recomputed operators": ({}, {"ac_config": ActivationCheckpointingConfig(mode="selected_ops")}),
    "recomputed, dualpipev": ({"schedule": "dualpipev"}, {"ac_config": FULL}),
    "experts, 1f1b": ({}, {"model": EXPERTS["sequence_aux"]}),
    "experts, interleaved": ({"schedule": "interleaved_1f1b"}, {"model": EXPERTS["global_aux"]}),
    "experts, zero bubble": ({"schedule": "zero_bubble"}, {"model": EXPERTS["sequence_aux"]}),
    "experts, dualpipev": ({"schedule": "dualpipev"}, {"model": EXPERTS["global_aux"]}),
    **{name: ({"schedule": "interleaved_1f1b"}, {"optim": each}) for name, each in NAMED.items()},
}
FOUR: dict[str, Case] = {
    "hsdp": ({"strategy": "hsdp", "sharing": {"shard_degree": 1}}, {}),
    "pp4": ({"degree": 4}, {}),
    "offload": ({"sharing": {"cpu_offload": True, "prefetch_factor": 1}}, {}),
    "zero bubble": ({"schedule": "zero_bubble", "sharing": KEPT}, {}),
    "interleaved": ({"schedule": "interleaved_1f1b"}, {"ac_config": FULL}),
    "dealt": ({"ep_config": ExpertParallelConfig(degree=2)}, {"model": EXPERTS["sequence_aux"]}),
    "matrices": ({}, {"optim": OPTIMS["muon"]}),
}


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
    return two_steps(module, [rows] * (8 // module.world.readers // rows))


def of_case(which: str, case: Case, ranks: int) -> Run:
    """Two steps of a case, on this many ranks."""
    several, one = case
    module = piped(**several, **one) if ranks > 1 else build(**{"model": DENSE, **one})
    return steps(module, rows=8 if "few" in which else 1)


def of_cases(cases: dict[str, Case]) -> dict[Any, Any]:
    return {which: of_case(which, case, dist.get_world_size()) for which, case in cases.items()}


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
    results |= of_cases(TWO)
    results["resumed"] = resumed(Path(folder))
    module = piped(schedule="zero_bubble")
    results["seen"] = watched(module, batches(module, 1))
    module = piped(non_finite="skip")
    layer = next(block for block in module.model.blocks if block is not None).feed_forward
    results["non-finite"] = after_a_nan(module, layer, world().main, partial(batches, module))
    results["refused"] = refused()
    module = piped()
    results["lost"] = lost(module, 1, partial(batches, module), seconds=3)  # the last one
    return results


def slow_checks() -> dict[Any, Any]:
    """More of one of two ranks."""
    results = of_cases(SLOW)
    decoder = build_decoder(DENSE)
    init_parameters(decoder, 5 + world().rank)  # rank 0's are taken
    config = piped().config
    results["a decoder"] = steps(TransformerTrainModule(config, decoder, seed=1, world=world()))
    results["compiled"] = steps(piped(compile_model=True))
    return results


def four_checks() -> dict[Any, Any]:
    """Run every check of this rank, one of four."""
    results = of_cases(FOUR)
    results["evaluated"] = evaluated(piped(schedule="interleaved_1f1b"), LENGTHS[:2])
    tensor = {"model": EVEN, "tp_config": TensorParallelConfig(degree=2)}
    cut = piped(schedule="dualpipev", sharing=KEPT, **tensor)
    results["cut, evaluated"] = evaluated(cut, LENGTHS[world().rank : world().rank + 2])
    results["cut"] = steps(cut)
    results["cut, seen"] = watched(cut, batches(cut, 1))
    return results


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
