"""What each of two or four ranks does for tests/olm_train/parallel/test_tensor.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.batches import make_batch
from support.expert_ranks import BALANCES, MUON, RECOMPUTED, of_experts
from support.training import LENGTHS, MODEL, ROWS, build, digest, full, micro_batches, train, whole
from torch import Tensor

from olm_data.errors import OlmError
from olm_train.checkpoint.save import Contents, save_checkpoint
from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.model.loss_config import LossConfig
from olm_train.model.shards import like, local_part, tensor_cut
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.given import NamedOptim
from olm_train.parallel.config import (
    ContextParallelConfig,
    ExpertParallelConfig,
    TensorParallelConfig,
)
from olm_train.train_module import TransformerTrainModule

BASE = MODEL.changed(vocab_multiple=4)
MODELS: dict[str, DecoderConfig] = {
    "grouped": BASE,
    "one head of keys": BASE.changed(
        n_kv_heads=1, attention={"qk_norm": "full", "bias": "qkv"},
        norm={"name": "layer_norm", "bias": True},
    ),
    "tied": BASE.changed(
        vocab_multiple=52, head={"tied": True, "softcap": 3.0},
        attention={"sliding_window": (6, -1), "softcap": 2.0, "qk_norm": "head"},
    ),
    "learned": BASE.changed(
        feed_forward={"name": "gelu", "hidden_size": 48, "bias": True},
        positions={"name": "learned", "max_positions": 32},
        attention={"shift_keys": True, "bias": "all"},
    ),
    "full QK-norm": BASE.changed(attention={"qk_norm": "full"}, block="reordered_norm"),
    "centred": BASE.changed(
        attention={"qk_norm": "full", "backend": "math"}, block="peri_norm",
        norm={"zero_centred": True},
    ),
    "shared head": BASE.changed(n_kv_heads=1, attention={"qk_norm": "head"}),
    "experts": of_experts().changed(vocab_multiple=4),
}  # fmt: skip
"""With 104 rows of 97 ids the last of four ranks has 26 rows, 19 of them with an id."""
OPTIMS = {
    "muon": MUON,
    "half": AdamWConfig(lr=1e-2, dtype="bfloat16"),
    "sgd": NamedOptim.of("torch.optim:SGD", torch.optim.SGD, {"lr": 1e-2, "foreach": True}),
    "nadam": NamedOptim.of("torch.optim:NAdam", torch.optim.NAdam, {"lr": 1e-2}),
}
Z_LOSS = LossConfig(name="chunked", chunk_size=40, z_loss_multiplier=0.1)
TWO: dict[str, dict[str, Any]] = {
    **{name: {"model": model} for name, model in MODELS.items()},
    "recomputed": {"model": BASE, "ac_config": RECOMPUTED["full"], "parts": 2, "loss": Z_LOSS},
    "chosen ops": {"model": MODELS["experts"], "ac_config": RECOMPUTED["ops"], "parts": 2},
    "balanced": {"model": of_experts(**BALANCES["global_aux"]).changed(vocab_multiple=4)},
    "dealt": {"model": MODELS["experts"], "ep": 2},
}  # fmt: skip
"""Of two ranks."""
SOME = ["one head of keys", "tied", "experts", "recomputed"]
FOUR: dict[str, dict[str, Any]] = {
    "fsdp": {"model": MODELS["tied"]},
    "fsdp, experts": {"model": MODELS["experts"], "parts": 2},
    "fsdp, each": {"model": BASE, "sharing": {"reduce_each_microbatch": True}, "parts": 2},
    "hsdp": {"model": MODELS["one head of keys"], "strategy": "hsdp", "replicas": 2},
    "hsdp, experts": {"model": MODELS["experts"], "strategy": "hsdp", "replicas": 2,
                      "ac_config": RECOMPUTED["full"], "parts": 2},
    "cp": {"model": MODELS["full QK-norm"], "cp": "gather", "parts": 2},
    "cp, window": {"model": MODELS["tied"], "cp": "gather"},
    "cp, heads": {"model": BASE.changed(n_heads=8, n_kv_heads=4), "cp": "ulysses"},
    "cp, experts": {"model": MODELS["experts"], "cp": "gather"},
    "dealt": {"model": MODELS["experts"], "ep": 2},
    "dealt to all": {"model": of_experts(n_experts=8).changed(vocab_multiple=4), "ep": 4},
    "offload": {"model": BASE, "sharing": {"cpu_offload": True}},
}  # fmt: skip
"""Of four ranks, two of them in a group."""


@dataclass
class Trained:
    """What a run of three steps did; gradients are those of its first step."""

    initial: str = ""
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluated: list[Tensor] = field(default_factory=list)


def three_steps(module: TransformerTrainModule, parts: int = 1) -> Trained:
    run = Trained(initial=digest(full(module)["model"]))

    def take() -> None:
        for name, p in module.model.named_parameters():
            if p.grad is not None and name not in run.gradients:
                run.gradients[name] = whole(like(p.grad, p), module.world)

    module.gradients_ready = take
    share = ROWS // module.world.readers
    for step in (1, 2, 3):
        batches = micro_batches(step, [share] if parts == 1 else [1, share - 1], module.world)
        metrics = module.train_step(batches, step, 6)
        run.losses.append(float(metrics["train/CE loss"]))
        run.metrics |= {f"{name} {step}": float(value) for name, value in metrics.items()}
    run.weights = full(module)["model"]
    for row in (module.world.rank, 5):  # each rank evaluates other rows
        batch = make_batch([LENGTHS[row]], vocab_size=8, seed=row)
        run.evaluated.append(module.eval_losses(batch))
        run.evaluated.append(module.eval_losses(batch, fp32_logits=True))
    return run


def options_of(
    *, parts: int = 1, ep: int = 1, cp: str = "", replicas: int = 1, strategy: str = "fsdp",
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any], int]:  # fmt: skip
    """Options of `build`: of one rank, those of several beside them; and micro-batches."""
    alone = {k: options.pop(k) for k in ("model", "ac_config", "loss") if k in options}
    several: dict[str, Any] = {"strategy": strategy, **options}
    if replicas > 1:
        several["sharing"] = {"num_replicas": replicas}
    if ep > 1:
        several["ep_config"] = ExpertParallelConfig(degree=ep)
    if cp:
        several["cp_config"] = ContextParallelConfig(degree=2, exchange=cp)  # type: ignore[arg-type]
    return alone, several, parts


def cut(degree: int = 2, **options: Any) -> TransformerTrainModule:
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return build(world=world, tp_config=TensorParallelConfig(degree=degree), **options)


def run_of(case: dict[str, Any], degree: int = 2) -> Trained:
    alone, several, parts = options_of(**case)
    return three_steps(cut(degree, **alone, **several), parts)


def all_checks(folder: str, cases: Sequence[str], optims: Sequence[str]) -> dict[Any, Any]:
    """Run every check on this rank; `folder` holds a checkpoint of one rank, and gets ours."""
    results: dict[Any, Any] = {name: run_of(TWO[name], dist.get_world_size()) for name in cases}
    for name in optims:
        module = cut(model=MODELS["experts"], optim=OPTIMS[name])
        results["optim", name] = train(module, [ROWS // module.world.readers])
    results["resumed"] = _resumed(Path(folder))
    results["refused"] = _refused()
    parameters = dict(cut(model=MODELS["experts"]).model.named_parameters())
    results["held"] = {name: tuple(local_part(p).shape) for name, p in parameters.items()}
    results["cut"] = {name for name, p in parameters.items() if tensor_cut(p) is not None}
    results["seen"] = _seen()
    return results


def four_checks(folder: str) -> dict[Any, Any]:
    """Run every check of this rank, one of four."""
    results = all_checks(folder, ["grouped", "one head of keys", "tied", "experts"], list(OPTIMS))
    for name, case in FOUR.items():
        results["layout", name] = run_of(case)
    return results


def compiled_checks() -> list[float]:
    """Losses of a run of compiled blocks."""
    return train(cut(model=BASE, compile_model=True), [ROWS], steps=[1, 2]).losses


def _load(module: TransformerTrainModule, path: Path) -> str:
    state = module.state_dict()
    dcp.load(state, checkpoint_id=path)
    module.load_state_dict(state)
    return digest(full(module)["model"])


def _resumed(folder: Path) -> dict[str, Any]:
    """Runs that go on from what one rank saved, from an interruption, and under fsdp."""

    def fresh() -> TransformerTrainModule:
        return cut(model=BASE, optim=MUON)

    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    module = fresh()
    share = [ROWS // module.world.readers]
    loaded = _load(module, folder / "one")
    from_one = train(module, share, steps=[3, 4])
    straight = train(fresh(), share, steps=[1, 2, 3, 4])
    module = fresh()
    train(module, share, steps=[1, 2])
    saved = folder / f"tp{world.size}"
    dcp.save(module.state_dict(), checkpoint_id=saved)
    contents = Contents(
        step=2, kind="permanent", state=module.state_dict(), documents={}, lock_digest=""
    )
    ours = save_checkpoint(folder / f"ours{world.size}", contents, world, work_dir=folder)
    module = fresh()
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.zero_()
    _load(module, saved)
    rest = train(module, share, steps=[3, 4])
    fsdp = build(world=world, model=BASE, optim=MUON)
    _load(fsdp, saved)
    other = train(fsdp, [ROWS // world.size], steps=[3, 4])
    return {
        "loaded": loaded,
        "losses": from_one.losses,
        "rest": rest.losses,
        "fsdp": other.losses,
        "ours": ours,
        "same": (rest.losses, digest(rest.weights))
        == (straight.losses[2:], digest(straight.weights)),
    }


def _refused() -> str:
    """What is said where ranks that share a micro-batch got different rows."""
    module = cut(model=BASE)
    try:
        module.train_step([make_batch(LENGTHS, vocab_size=8, seed=dist.get_rank())], 1, 6)
    except OlmError as error:
        return str(error)
    return ""


def _seen() -> list[Tensor]:
    """What is shown of the losses of labels."""
    module, seen = cut(model=BASE), list[Tensor]()
    module.watch_losses = lambda batch, by_label: seen.append(by_label.view_as(batch.labels))
    module.train_step(micro_batches(1, [ROWS // module.world.readers], module.world), 1, 6)
    return seen
