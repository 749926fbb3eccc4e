"""What a rank sends to others in a step, by axis, before anything is started.

    model, options, degrees -> bytes of weights, gradients, keys, tokens -> by axis

As a ring sends them: to gather a tensor over n ranks, or to sum and cut it, each rank sends
(n - 1) / n of it; to sum it on all, twice that. Where each rank has a message for each other one,
a part of 1 / n stays at home. Keys that queries need (`cp_config.exchange: needed`) are those of
documents as long as rows, as these would be dealt. Not counted: the few numbers of a loss, and
evaluations.

Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from olm_train.data.dealing import deal, lacking
from olm_train.estimate.memory import ITEMSIZE, TrainingTensors
from olm_train.model.config import DecoderConfig
from olm_train.model.mixture import EXPERT_TENSORS, MixtureConfig
from olm_train.model.part import FP32
from olm_train.model.shards import CUT_TENSORS
from olm_train.parallel.mesh import CUT, EXPERT, WHOLE, Mesh
from olm_train.parallel.stages import spans
from olm_train.train_module_config import TransformerTrainModuleConfig

LABEL = 8
"""Bytes of a label."""
SUMS = 3
"""Numbers of a label that a loss over a cut vocabulary is summed of: the largest logit, the sum of
their exponentials, the logit of the label."""


class _Part(NamedTuple):
    """What a rank of a pipeline has, or of a run without one.

    Attributes:
        tensors: its weights.
        layers: of the decoder.
        sends: states of a micro-batch, and gradients of them, that go to ranks with other layers.
    """

    tensors: TrainingTensors
    layers: Sequence[int]
    sends: int = 0


def traffic_of_step(
    model: DecoderConfig,
    module: TransformerTrainModuleConfig,
    *,
    world_size: int,
    nodes: int = 1,
    micro_batches: int = 1,
    sequence_length: int | None = None,
    counted: TrainingTensors | None = None,
) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by what they are sent for; of a pipeline those
    of the rank that sends most.

    Args:
        module: nothing of it `auto`.
        world_size: ranks of the run.
        nodes: machines they are on.
        micro_batches: of a rank in a step.
        sequence_length: tokens of a row; None: of a micro-batch.
        counted: the tensors of this model and optimiser, for who asks more than once.

    Raises:
        UsageError: the parallel degrees do not fit the world.
    """
    mesh = module.mesh(world_size, nodes)
    tokens = micro_batches * module.rank_microbatch_size // mesh.cp
    found = []
    for part in _parts(counted or TrainingTensors.count(model, module.optim), module):
        sent = Counter[str]()
        for axis, amount in _of_weights(part, module, mesh, micro_batches):
            sent[axis] += round(amount)
        for axis, amount in _of_tokens(part, module, mesh, sequence_length):
            sent[axis] += round(tokens * amount)
        found.append({axis: amount for axis, amount in sent.items() if amount})
    return max(found, key=lambda sent: sum(sent.values()))


def _parts(tensors: TrainingTensors, module: TransformerTrainModuleConfig) -> Iterator[_Part]:
    model, pipeline = tensors.model, module.pp_config
    if pipeline is None:
        yield _Part(tensors, range(model.n_layers))
        return
    stages = spans(pipeline, model)
    for rank in range(pipeline.degree):
        own = pipeline.stages_of(rank)
        around = (other for stage in own for other in (stage - 1, stage + 1))
        layers = [stages[stage] for stage in own]
        yield _Part(
            tensors.of_stages(layers),
            [layer for each in layers for layer in each],
            sum(0 <= other < len(stages) and other not in own for other in around),
        )


def _of_weights(
    part: _Part, module: TransformerTrainModuleConfig, mesh: Mesh, micro_batches: int
) -> Iterator[tuple[str, float]]:
    """Yield bytes of weights that are gathered and gradients that are summed, by axis."""
    config = module.dp_config
    size, reduced = ITEMSIZE[config.param_dtype], ITEMSIZE[config.reduce_dtype]
    sums = micro_batches if config.reduce_each_microbatch else 1
    for name, shape in part.tensors.parameters.items():
        numel, held = math.prod(shape), WHOLE
        if mesh.ep > 1 and name.endswith(EXPERT_TENSORS):
            numel, held = numel // mesh.ep, EXPERT
        elif mesh.tp > 1 and f".{name}".endswith(CUT_TENSORS):
            numel, held = numel // mesh.tp, CUT
        shards, copies = mesh.degree(*held.sharded), mesh.degree(*held.copies)
        if not config.shards:
            yield "ddp", 2 * FP32 * numel * _away(shards * copies)
            continue
        again = shards
        if not name.startswith("blocks.") or config.reshard_after_forward is False:
            again = 1
        elif config.reshard_after_forward is not True:
            again = config.reshard_after_forward
        gathers = _away(shards) + _away(again)
        yield "fsdp", (1 if mesh.pp > 1 else micro_batches) * size * numel * gathers
        yield "fsdp", sums * reduced * numel * _away(shards)
        yield "hsdp", 2 * reduced * numel / shards * _away(copies)


def _of_tokens(
    part: _Part, module: TransformerTrainModuleConfig, mesh: Mesh, length: int | None
) -> Iterator[tuple[str, float]]:
    """Yield bytes for a token of this rank, forward and backward, by axis."""
    model, size = part.tensors.model, ITEMSIZE[module.dp_config.param_dtype]
    again, layers = module.ac_config.recomputed(model.n_layers), len(part.layers)
    passes = (2 + again) * size
    state = size * model.d_model
    yield "pp", state * part.sends / mesh.tp
    heads, keys = (n * model.head_size // mesh.tp for n in (model.n_heads, model.kv_heads))
    if module.cp_config is not None:
        gathered, sent = keys * model.attention.shift_keys, passes * layers * (mesh.cp - 1)
        if module.cp_config.exchange == "ulysses":
            yield "cp", passes * layers * (2 * heads + 2 * keys) * _away(mesh.cp)
        else:
            gathered += 2 * keys
        if module.cp_config.exchange == "needed":
            sent = size * _needed(part, module, mesh.cp, length, 1 + again)
        yield "cp", sent * gathered
    for layer in part.layers:
        feed_forward = model.feed_forwards[layer]
        routes = isinstance(feed_forward, MixtureConfig)
        if mesh.ep > 1 and isinstance(feed_forward, MixtureConfig):
            sent = 2 * feed_forward.top_k * model.d_model / mesh.tp
            yield "ep", passes * sent * _away(mesh.ep)
        # tokens gathered for rows of a matrix and again for their gradient, which is scattered, as
        # is what columns of the next one make; its gradient is gathered
        yield "tp", (5 + 2 * again) * state * (2 - routes) * _away(mesh.tp)
    if 0 in part.layers:  # the embeddings, there and back
        yield "tp", 2 * state * _away(mesh.tp)
    if model.n_layers - 1 in part.layers:  # the head; labels
        yield "tp", (2 * state + LABEL + 2 * SUMS * FP32) * _away(mesh.tp)


def _needed(
    part: _Part,
    module: TransformerTrainModuleConfig,
    degree: int,
    length: int | None,
    forward: float,
) -> float:
    """Return how often a token's key is sent, by the rank that sends most, for each it has.

    Args:
        length: tokens of a document; None: of the micro-batch.
        forward: passes in which keys are sent there; their gradients come back once.
    """
    tokens, windows = module.rank_microbatch_size, part.tensors.model.windows
    cu_seqlens = np.arange(0, tokens + 1, length or tokens, dtype=np.int32)
    dealt = deal(cu_seqlens, degree, windows)
    sent = np.zeros(degree)
    for window, layers in Counter(windows[layer] for layer in part.layers).items():
        of_ranks = [lacking(cu_seqlens, dealt, rank, window) for rank in range(degree)]
        counts = np.array([[len(each) for each in others] for others in of_ranks])
        sent += layers * (forward * counts.sum(0) + counts.sum(1))
    return float(sent.max()) * degree / tokens


def _away(ranks: int) -> float:
    """Return the share that does not stay at home."""
    return (ranks - 1) / ranks
