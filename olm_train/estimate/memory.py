"""What a rank's device must hold while it trains, by component, before anything is allocated.

    model, optimiser --built on the meta device--> tensors --cut over the ranks--> bytes   exact
    model, tokens of a micro-batch --------------> what autograd keeps -----------> bytes   estimate

Weights, gradients and optimiser state are counted tensor by tensor, so they are exact for every
option of the model and every optimiser. Activations and logits follow from what the eager blocks
keep for the backward pass; `torch.compile` keeps less. Not counted: the allocator's fragments,
buffers of collectives, and the device's own context (about 1 GB); leave a tenth of the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from olm_train.estimate.device_defaults import AUTO, Capability, resolve
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import build_decoder
from olm_train.model.loss import LOGITS_BYTES
from olm_train.model.mixture import EXPERT_TENSORS
from olm_train.model.part import FP32, Saved
from olm_train.model.shards import CUT_TENSORS
from olm_train.optim.base import OptimConfig
from olm_train.parallel.config import PipelineParallelConfig
from olm_train.parallel.mesh import WHOLE
from olm_train.parallel.stages import Timeline, spans
from olm_train.train_module_config import TransformerTrainModuleConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank at the peak of a step.

    Attributes:
        weights: fp32 master weights, this rank's part.
        gradients: fp32 gradients, this rank's part; whole ones where they are accumulated.
        optimizer: optimiser state, this rank's part.
        gathered: whole weights in the compute dtype: the blocks at work and the root with FSDP,
            all matrices without it if they compute in another dtype.
        activations: kept for the backward pass, and of a block that is recomputed what exceeds
            the logits.
        logits: of a micro-batch (or of a chunk of it), with the loss and their gradients.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All components at once, an upper bound: not all of them peak at the same moment."""
        return sum(self.by_component().values())

    def by_component(self) -> dict[str, int]:
        """Return bytes by component, in the order of the attributes."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TrainingTensors:
    """The tensors of a model and its optimiser, counted once; `memory` asks what if.

    Attributes:
        model: shape of the model.
        parameters: shape of each parameter by name.
        state: bytes of optimiser state by parameter: of tensors cut as it is, and of all others.
    """

    model: DecoderConfig
    parameters: Mapping[str, tuple[int, ...]]
    state: Mapping[str, tuple[int, int]]

    @classmethod
    def count(cls, model: DecoderConfig, optim: OptimConfig) -> TrainingTensors:
        """Build model and optimiser on the meta device and count; 70B takes about a second."""
        decoder = build_decoder(model, device="meta", dtype=torch.float32)
        optimizer = optim.build(decoder)
        state = {}
        for name, parameter in decoder.named_parameters():
            tensors = [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor)]
            kind = parameter.ndim, parameter.shape[-1:]
            same = sum(t.nbytes for t in tensors if (t.ndim, t.shape[-1:]) == kind)
            state[name] = (same, sum(t.nbytes for t in tensors) - same)
        shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
        return cls(model, shapes, state)

    def of_stages(self, layers: Sequence[range]) -> TrainingTensors:
        """Return those of stages of a pipeline, of which each has such layers."""
        numbers = {layer for each in layers for layer in each}
        ends = {
            0: ("embeddings", "position_embeddings"),
            self.model.n_layers - 1: ("norm", "lm_head"),
        }
        around = {part for layer, parts in ends.items() if layer in numbers for part in parts}

        def here(name: str) -> bool:
            first, number, *_ = name.split(".")
            return int(number) in numbers if first == "blocks" else first in around

        shapes = {name: shape for name, shape in self.parameters.items() if here(name)}
        return TrainingTensors(self.model, shapes, {name: self.state[name] for name in shapes})

    def memory(
        self,
        *,
        microbatch: int,
        sequence_length: int,
        shards: int = 1,
        dealt: int = 1,
        cut: int = 1,
        param_dtype: str = "float32",
        kept: float = 1.0,
        loss_tokens: int | None = None,
        reshard_after_forward: bool | int = True,
        offload: bool = False,
        accumulates: bool = False,
        keys: int = 1,
        alive: int | None = None,
        states: int = 0,
    ) -> Memory:
        """Return what one rank needs.

        Args:
            microbatch: tokens a rank takes through forward and backward at once.
            sequence_length: tokens of a row.
            shards: ranks that share one copy of weights, gradients and optimiser state: 1 for DDP
                and for one rank, the world size for FSDP, one group of it for HSDP.
            dealt: ranks that have other experts, of those.
            cut: ranks that matrices are cut over, of those; each has as many of the tokens.
            param_dtype: dtype of the computation, "float32" or "bfloat16".
            kept: share of what the blocks would keep that is kept: 1 without activation
                checkpointing, 0 if each block keeps its input only.
            loss_tokens: tokens whose logits exist at once; None: the whole micro-batch.
            reshard_after_forward: FSDP frees a block's whole weights between its forward and
                backward; a number: keeps them cut over so many ranks.
            offload: weights, gradients and optimiser state live in the host's memory.
            accumulates: each rank sums whole gradients of several micro-batches until the last one
                of a step, where they are exchanged and cut.
            keys: keys of a layer, and values, for each token: those of other ranks too.
            alive: layers whose activations are kept at once, of each micro-batch; None: those of
                the model, of one.
            states: of micro-batches, and their gradients, that stages of a pipeline have room for.
        """
        model, size = self.model, ITEMSIZE[param_dtype]
        whole, own = dict[str, int](), dict[str, int]()
        for name, shape in self.parameters.items():
            whole[name], own[name] = math.prod(shape), _shard(shape, shards)
            if dealt > 1 and name.endswith(EXPERT_TENSORS):
                whole[name] //= dealt
                own[name] = whole[name] // (shards // dealt)
            if cut > 1 and f".{name}".endswith(CUT_TENSORS):
                whole[name] //= cut
                own[name] = whole[name] // (shards // cut)
        per_block, block_input = block_bytes(model, sequence_length, param_dtype)
        per_block += (keys - 1) * size * 2 * model.kv_heads * model.head_size
        alive = model.n_layers if alive is None else alive
        blocks = alive * (kept * per_block + (1 - kept) * block_input) + states * block_input
        around = size * 2 * model.d_model + model.positions.kept(model)  # the last norm, positions
        loss = microbatch if loss_tokens is None else min(loss_tokens, microbatch)
        loss = loss if "norm.weight" in self.parameters else 0
        logits = loss * model.padded_vocab_size * (LOGITS_BYTES if size < FP32 else 2 * FP32)
        logits, microbatch = logits // cut, microbatch // cut  # tokens between products of matrices
        # The logits are gone when a block is recomputed.
        again = microbatch * (per_block - block_input) if kept < 1 else 0
        here = 0 if offload else 1
        part = here * FP32 * sum(own.values())
        return Memory(
            weights=part,
            gradients=FP32 * sum(whole.values()) if accumulates else part,
            optimizer=here
            * sum(
                same * own[name] // math.prod(self.parameters[name]) + other
                for name, (same, other) in self.state.items()
            ),
            gathered=self._gathered(whole, shards, size, reshard=reshard_after_forward),
            activations=round(microbatch * (blocks + around) + max(again - logits, 0)),
            logits=logits,
        )

    def _gathered(
        self, whole: Mapping[str, int], shards: int, size: int, *, reshard: bool | int
    ) -> int:
        """Bytes of whole weights, of so many elements, beside the rank's own part."""
        blocks: dict[str, int] = {}
        root = table = 0
        for name, numel in whole.items():
            parts = name.split(".")
            if parts[0] == "blocks":
                blocks[parts[1]] = blocks.get(parts[1], 0) + numel
            elif parts[0] == "embeddings" and not self.model.head.tied:
                table += numel
            else:
                root += numel
        largest = sorted(blocks.values(), reverse=True)
        if shards == 1:  # each matrix product keeps its cast weight; a look-up casts nothing
            return 0 if size == FP32 else size * (sum(largest) + root)
        # One block computes while the next is gathered, and the last one's gradients are reduced.
        kept = 0 if reshard is True else sum(largest[2:]) // max(int(reshard), 1)
        return size * (sum(largest[:2]) + kept + root + table) + FP32 * largest[0]


def memory_of_step(
    model: DecoderConfig,
    module: TransformerTrainModuleConfig,
    *,
    sequence_length: int,
    world_size: int,
    nodes: int = 1,
    micro_batches: int = 1,
    counted: TrainingTensors | None = None,
) -> Memory:
    """Return what one rank of a run needs, of a pipeline the one that needs most, as its
    `train_module` is configured.

    What is still `auto` counts as on a CPU.

    Args:
        sequence_length: tokens of a row, the longest of the run.
        world_size: ranks of the run.
        nodes: machines they are on.
        micro_batches: of a rank in a step.
        counted: the tensors of this model and optimiser, for who asks many times.

    Raises:
        UsageError: the parallel degrees do not fit the world, or the schedule of a pipeline not the
            micro-batches.
    """
    on_cpu = model.attention.backend == AUTO
    model, module, _ = resolve(model, module, Capability())
    dp, microbatch = module.dp_config, module.rank_microbatch_size
    mesh = module.mesh(world_size, nodes)
    loss = module.chosen_loss(model)
    counted = counted or TrainingTensors.count(model, module.optim)
    ranks: list[tuple[TrainingTensors, dict[str, Any]]] = [(counted, {})]
    reshard = dp.reshard_after_forward
    if (pipeline := module.pp_config) is not None:
        ranks, reshard = _ranks_of(pipeline, counted, micro_batches), False
    needs = [
        tensors.memory(
            microbatch=microbatch // mesh.cp,
            cut=mesh.tp,
            sequence_length=sequence_length,
            loss_tokens=loss.tokens_at_once(on_cpu=on_cpu),
            kept=_kept(model, module, sequence_length),
            shards=mesh.degree(*WHOLE.sharded) if dp.shards else 1,
            dealt=mesh.ep,
            keys=mesh.cp if module.cp_config and module.cp_config.exchange != "ulysses" else 1,
            param_dtype=dp.param_dtype,
            reshard_after_forward=reshard,
            offload=dp.cpu_offload and world_size > 1,
            accumulates=micro_batches > 1 and not dp.reduce_each_microbatch,
            **options,
        )
        for tensors, options in ranks
    ]
    return max(needs, key=lambda need: need.total)


def _ranks_of(
    pipeline: PipelineParallelConfig, counted: TrainingTensors, micro_batches: int
) -> list[tuple[TrainingTensors, dict[str, Any]]]:
    """Return the tensors of each rank of a pipeline, and what it keeps of a step."""
    of_stages = spans(pipeline, counted.model)
    timeline = Timeline(pipeline, micro_batches)
    found = []
    for rank in range(pipeline.degree):
        own = pipeline.stages_of(rank)
        borders = 2 * len(own) - (0 in own) - (pipeline.stages - 1 in own)
        options = {
            "alive": timeline.alive(rank, [len(layers) for layers in of_stages]),
            "states": borders * micro_batches,
        }
        found.append((counted.of_stages([of_stages[stage] for stage in own]), options))
    return found


def _kept(
    model: DecoderConfig, module: TransformerTrainModuleConfig, sequence_length: int
) -> float:
    """Share of what the blocks would keep that activation checkpointing leaves."""
    config = module.ac_config
    if config.mode == "selected_ops":  # results of matrix products and of attention
        attention = model.attention.products(model, sequence_length)
        dtype = module.dp_config.param_dtype
        feed_forward = sum(part.products(model) for part in model.feed_forwards) / model.n_layers
        ops = ITEMSIZE[dtype] * (attention + feed_forward)
        return min(1.0, ops / block_bytes(model, sequence_length, dtype)[0])
    if config.mode == "budget":
        return config.activation_memory_budget or 0.0
    return 1 - config.recomputed(model.n_layers)


def block_bytes(
    model: DecoderConfig, sequence_length: int, param_dtype: str
) -> tuple[float, float]:
    """Return the bytes a token costs in the mean block: all that is kept, and its input alone.

    Kept are the inputs of each norm, matrix product, attention and activation function, as each
    part says (`kept`); views keep the tensor they look into. Statistics are fp32.
    """
    saved = Saved(ITEMSIZE[param_dtype], sequence_length)
    kept = (
        model.attention.kept(model, saved, rotated=model.positions.rotates)
        + sum(part.kept(model, saved) for part in model.feed_forwards) / model.n_layers
        + model.block.kept(model, saved)
    )
    return float(kept), float(saved.itemsize * model.d_model)


def _shard(shape: tuple[int, ...], shards: int) -> int:
    """Elements of the first rank's part: rows are cut, the first parts are the largest."""
    return -(-shape[0] // shards) * math.prod(shape[1:])
