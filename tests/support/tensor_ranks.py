"""What each of two or four ranks does for tests/olm_train/parallel/test_tensor.py; by name.

One call for all of it: starting processes is what costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.batches import make_batch
from support.expert_ranks import BALANCES, MUON, RECOMPUTED, of_experts
from support.training import (
    LENGTHS,
    MODEL,
    ROWS,
    Run,
    build,
    micro_batches,
    rows_refused,
    two_steps,
    watched,
)
from torch import Tensor

from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.model.loss_config import LossConfig
from olm_train.model.shards import local_part, tensor_cut
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.dion import DionConfig
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
    "dion": DionConfig(lr=1e-2),
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
    "fsdp, each": {"model": BASE, "sharing": {"reduce_each_microbatch": True}, "parts": 2},
    "hsdp": {"model": MODELS["one head of keys"], "strategy": "hsdp", "replicas": 2},
    "cp": {"model": MODELS["full QK-norm"], "cp": "gather", "parts": 2},
    "cp, window": {"model": MODELS["tied"], "cp": "gather"},
    "cp, heads": {"model": BASE.changed(n_heads=8, n_kv_heads=4), "cp": "ulysses"},
    "dealt to all": {"model": of_experts(n_experts=8).changed(vocab_multiple=4), "ep": 4},
    "offload": {"model": BASE, "sharing": {"cpu_offload": True}},
}  # fmt: skip
"""Of four ranks, two of them in a group."""


def steps_of(module: TransformerTrainModule, parts: int = 1) -> tuple[Run, list[Tensor]]:
    """Two steps, and what an evaluation says of rows of this rank's own and of row 5."""
    share = ROWS // module.world.readers
    run, evaluated = two_steps(module, [share] if parts == 1 else [1, share - 1]), list[Tensor]()
    for row in (module.world.rank, 5):
        batch = make_batch([LENGTHS[row]], vocab_size=8, seed=row)
        evaluated.append(module.eval_losses(batch))
        evaluated.append(module.eval_losses(batch, fp32_logits=True))
    return run, evaluated


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


def run_of(case: dict[str, Any], degree: int = 2) -> tuple[Run, list[Tensor]]:
    alone, several, parts = options_of(**case)
    return steps_of(cut(degree, **alone, **several), parts)


def all_checks(cases: Sequence[str], optims: Sequence[str]) -> dict[Any, Any]:
    """Run every check on this rank."""
    results: dict[Any, Any] = {name: run_of(TWO[name], dist.get_world_size()) for name in cases}
    for name in optims:
        module = cut(model=MODELS["experts"], optim=OPTIMS[name])
        results["optim", name] = two_steps(module, [ROWS // module.world.readers])
    results["refused"] = rows_refused(cut(model=BASE))
    parameters = dict(cut(model=MODELS["experts"]).model.named_parameters())
    results["held"] = {name: tuple(local_part(p).shape) for name, p in parameters.items()}
    results["cut"] = {name for name, p in parameters.items() if tensor_cut(p) is not None}
    module = cut(model=BASE)
    rows = [ROWS // module.world.readers]
    results["seen"] = watched(module, micro_batches(1, rows, module.world))
    return results


def four_checks() -> dict[Any, Any]:
    """Run every check of this rank, one of four."""
    results = all_checks(["grouped", "one head of keys", "tied", "experts"], list(OPTIMS))
    for name, case in FOUR.items():
        results["layout", name] = run_of(case)
    return results


def compiled_checks() -> list[float]:
    """Losses of a run of compiled blocks."""
    return two_steps(cut(model=BASE, compile_model=True), [ROWS]).losses
