"""Short training runs over a fixed global batch, cut in any way, and what they leave behind."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support.batches import make_batch
from torch.distributed.tensor import DTensor

from olm_train.data.batch import Batch
from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.model.shards import local_blocks, tensor_cut
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.schedule import CosineWithWarmup
from olm_train.parallel.config import DataParallelConfig
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig

MODEL = DecoderConfig(
    vocab_size=97,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    feed_forward={"hidden_size": 48},
    attention={"qk_norm": "head"},
)
STEPS = 6
ROWS = 8
LENGTHS = [[32], [1, 31], [16, 16], [5, 6, 7, 14], [1] * 32, [1] * 30 + [2], [20, 12], [1] * 32]
"""Valid labels by row: 31 down to none. No cut of 8 rows into parts gives each part the same."""


@dataclass
class Run:
    """What a run did. Tensors are full, fp32 or as in the state, on the CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def build(
    strategy: str = "fsdp",
    *,
    world: World | None = None,
    model: DecoderConfig = MODEL,
    param_dtype: Any = "float32",
    sharing: dict[str, Any] | None = None,
    **options: Any,
) -> TransformerTrainModule:
    """A small train module with a warm-up, a cosine and a large rate; `sharing` of its ranks."""
    defaults: dict[str, Any] = {
        "rank_microbatch_size": 32,
        "optim": AdamWConfig(lr=1e-2),
        "scheduler": CosineWithWarmup(warmup=2),
        "dp_config": DataParallelConfig(
            name=strategy,  # type: ignore[arg-type]
            param_dtype=param_dtype,
            **(sharing or {}),
        ),
    }
    config = TransformerTrainModuleConfig(**{**defaults, **options})
    return TransformerTrainModule(config, model, seed=5, world=world)


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start..stop of a batch."""
    names, length = ("input_ids", "labels", "rows"), batch.max_seqlen
    rows = {name: getattr(batch, name)[start:stop] for name in names}
    offsets = (batch.cu_seqlens - start * length).clamp(0, (stop - start) * length).unique()
    return replace(batch, cu_seqlens=offsets, **rows)  # type: ignore[arg-type]


def micro_batches(step: int, rows: Sequence[int], world: World) -> list[Batch]:
    """This rank's part of the global batch of `step`, cut into micro-batches of `rows` rows."""
    everything = make_batch(
        LENGTHS, vocab_size=8, seed=step
    )  # few of 97 ids: there is much to learn
    start, parts = world.reader * ROWS // world.readers, []
    for count in rows:
        parts.append(cut(everything, start, start + count))
        start += count
    assert start == (world.reader + 1) * ROWS // world.readers
    return parts


def train(
    module: TransformerTrainModule, rows: Sequence[int], steps: Sequence[int] | None = None
) -> Run:
    """Take `steps` of a run of STEPS, by default all of them."""
    run = Run(initial=digest(full(module)["model"]))
    for step in steps or range(1, STEPS + 1):
        metrics = module.train_step(micro_batches(step, rows, module.world), step, STEPS)
        run.losses.append(float(metrics["train/CE loss"]))
        run.norms.append(float(metrics["optim/total grad norm"]))
    run.weights = full(module)["model"]
    return run


def whole(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """A copy of a tensor, put together if it is sharded; every rank calls it."""
    if tensor_cut(tensor) is None:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    found = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    for blocks in world.gather(local_blocks(tensor)):
        for part, where in blocks:
            found[where] = part
    return found


def full(module: TransformerTrainModule) -> dict[str, dict[str, torch.Tensor]]:
    """A copy of the state with sharded tensors put together; every rank calls it."""
    return {
        part: {name: whole(x, module.world) for name, x in tensors.items()}
        for part, tensors in module.state_dict().items()
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """sha256 over names and bits."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
