"""What a rank sends to others in a step, by axis, before anything is started.

    model, options, degrees -> bytes of weights, gradients, keys, tokens -> by axis

As a ring sends them: to gather a tensor over n ranks, or to sum and cut it, each rank sends
(n - 1) / n of it; to sum it on all, twice that. Where each rank has a message for each other one,
a part of 1 / n stays at home. Not counted: the few numbers of a loss, and evaluations.

Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from olm_train.estimate.memory import ITEMSIZE
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import build_decoder
from olm_train.model.mixture import EXPERT_TENSORS, MixtureConfig
from olm_train.model.part import FP32
from olm_train.parallel.mesh import CUT, EXPERT, Mesh
from olm_train.train_module_config import TransformerTrainModuleConfig


def traffic_of_step(
    model: DecoderConfig,
    module: TransformerTrainModuleConfig,
    *,
    world_size: int,
    nodes: int = 1,
    micro_batches: int = 1,
) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by what they are sent for.

    Args:
        module: nothing of it `auto`.
        world_size: ranks of the run.
        nodes: machines they are on.
        micro_batches: of a rank in a step.

    Raises:
        UsageError: the parallel degrees do not fit the world.
    """
    mesh = module.mesh(world_size, nodes)
    sent = Counter[str]()
    for axis, amount in _of_weights(model, module, mesh, micro_batches):
        sent[axis] += round(amount)
    tokens = micro_batches * module.rank_microbatch_size // mesh.cp
    for axis, amount in _of_tokens(model, module, mesh):
        sent[axis] += round(tokens * amount)
    return {axis: amount for axis, amount in sent.items() if amount}


def _of_weights(
    model: DecoderConfig, module: TransformerTrainModuleConfig, mesh: Mesh, micro_batches: int
) -> Iterator[tuple[str, float]]:
    """Yield bytes of weights that are gathered and gradients that are summed, by axis."""
    config = module.dp_config
    size, reduced = ITEMSIZE[config.param_dtype], ITEMSIZE[config.reduce_dtype]
    sums = micro_batches if config.reduce_each_microbatch else 1
    for name, parameter in build_decoder(model, device="meta").named_parameters():
        numel, held = parameter.numel(), CUT
        if mesh.ep > 1 and name.endswith(EXPERT_TENSORS):
            numel, held = numel // mesh.ep, EXPERT
        shards, copies = mesh.degree(*held.sharded), mesh.degree(*held.copies)
        if not config.shards:
            yield "ddp", 2 * FP32 * numel * _away(mesh.size)
            continue
        yield "fsdp", micro_batches * size * numel * _away(shards)
        again = shards
        if not name.startswith("blocks.") or config.reshard_after_forward is False:
            again = 1
        elif config.reshard_after_forward is not True:
            again = config.reshard_after_forward
        yield "fsdp", micro_batches * size * numel * _away(again)
        yield "fsdp", sums * reduced * numel * _away(shards)
        yield "hsdp", 2 * reduced * numel / shards * _away(copies)


def _of_tokens(
    model: DecoderConfig, module: TransformerTrainModuleConfig, mesh: Mesh
) -> Iterator[tuple[str, float]]:
    """Yield bytes for a token of this rank, forward and backward, by axis."""
    size = ITEMSIZE[module.dp_config.param_dtype]
    checkpointing = module.ac_config
    again = {"full": 1.0}.get(checkpointing.mode, 0.0)
    if checkpointing.mode == "selected_blocks":
        interval = checkpointing.block_interval or 1
        again = math.ceil(model.n_layers / interval) / model.n_layers
    passes = (2 + again) * size
    if module.cp_config is not None:
        heads, keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
        gathered = keys * model.attention.shift_keys
        if module.cp_config.exchange == "gather":
            gathered += 2 * keys
        else:
            yield "cp", passes * model.n_layers * (2 * heads + 2 * keys) * _away(mesh.cp)
        yield "cp", passes * model.n_layers * gathered * (mesh.cp - 1)
    for part in model.feed_forwards:
        if mesh.ep > 1 and isinstance(part, MixtureConfig):
            yield "ep", passes * 2 * part.top_k * model.d_model * _away(mesh.ep)


def _away(ranks: int) -> float:
    """Return the share that does not stay at home."""
    return (ranks - 1) / ranks
