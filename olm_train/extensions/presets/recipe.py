"""How to train a preset on a kind of GPU: the fewest of them, and the options that fit there.

    preset, Gpu -> its tensors, counted once
      -> 1, 2, 4, 8 GPUs, 2, 4, ... machines
      -> recompute nothing | little | all x share the weights, least exchange first x loss
      -> the first that fits -> the micro-batch grows while it fits -> Recipe

Nothing here is measured: what fits is the estimate of `memory.py` against `Gpu.budget`. Blocks are
eager, attention is `varlen`, the computation bf16, the optimiser AdamW; the vocabulary and the row
are those the preset was published with.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

from olm_data.bounded_json import JsonObject
from olm_data.config.convert import as_dict
from olm_train.estimate.gpus import Gpu
from olm_train.estimate.memory import Memory, TrainingTensors, memory_of_step
from olm_train.estimate.sharding import Machine, candidates
from olm_train.model.config import DecoderConfig
from olm_train.model.loss_config import LossConfig
from olm_train.model.presets import PRESETS, preset
from olm_train.optim.adamw import AdamWConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.config import DataParallelConfig
from olm_train.train_module_config import TransformerTrainModuleConfig

ATTENTION = "varlen"
OLD_ATTENTION = "sdpa"
"""Of a GPU without bf16."""
PER_MACHINE = 8
"""GPUs of a machine; larger runs take whole machines."""
MOST_GPUS = 4096
ENOUGH_TOKENS = 8192
"""A micro-batch below this is taken only where no option allows more on as many GPUs."""
MOST_TOKENS = 32_768
"""A micro-batch does not grow beyond this, so that the global batch can still be chosen."""
CHECKPOINTING: tuple[Literal["none", "selected_ops", "full"], ...] = (
    "none",
    "selected_ops",
    "full",
)
LOSSES: tuple[Literal["auto", "chunked"], ...] = ("auto", "chunked")


@dataclass(frozen=True, kw_only=True)
class PresetOptions:
    """The options of a preset for a kind of GPU.

    Attributes:
        preset: its name.
        gpu: what it is for.
        gpus: how many of them.
        nodes: machines they are on.
        sequence_length: tokens of a row.
        module: micro-batch, `dp_config`, `ac_config` and `loss`; all else is the default.
        memory: bytes of one GPU, estimated, with one micro-batch a step.
        accumulates: whether several micro-batches a step fit too.
    """

    preset: str
    gpu: Gpu
    gpus: int
    nodes: int
    sequence_length: int
    module: TransformerTrainModuleConfig
    memory: int
    accumulates: bool

    @property
    def loss(self) -> str:
        """The loss that is taken: the named one, or what "auto" chooses."""
        module = self.module
        return module.loss.choose(
            _model(self.preset, self.gpu),
            microbatch=module.rank_microbatch_size,
            compiling=module.compile_model is True,
        ).name

    def values(self) -> JsonObject:
        """Return the part of `train.yaml` it decides, only what differs from the defaults."""
        plain: JsonObject = as_dict(self.module)
        default = as_dict(TransformerTrainModuleConfig(rank_microbatch_size=1))
        module: JsonObject = {"rank_microbatch_size": plain["rank_microbatch_size"]}
        for name in ("dp_config", "ac_config", "loss"):
            changed = {k: v for k, v in plain[name].items() if v != default[name][k]}
            if changed:
                module[name] = changed
        return {
            "model": {"preset": self.preset, "attention": {"backend": _attention(self.gpu)}},
            "train_module": module,
        }

    def summary(self) -> JsonObject:
        """Return what `--json` prints of it."""
        return {
            "preset": self.preset,
            "gpu": self.gpu.name,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "sequence_length": self.sequence_length,
            "loss": self.loss,
            "memory_bytes": self.memory,
            "budget_bytes": self.gpu.budget,
            "accumulates": self.accumulates,
            "config": self.values(),
        }


def recipe(name: str, gpu: Gpu) -> PresetOptions | None:
    """Return the recipe of preset `name`, None if `MOST_GPUS` are too few.

    Args:
        name: a key of `PRESETS`.
        gpu: the accelerator of each rank.
    """
    row = PRESETS[name].sequence_length
    model = _model(name, gpu)
    start = TransformerTrainModuleConfig(
        rank_microbatch_size=row,
        dp_config=DataParallelConfig(param_dtype="bfloat16" if gpu.modern else "float32"),
    )
    counted = counted_tensors(model)
    gpus = 1
    while gpus <= MOST_GPUS:
        machine = Machine(world_size=gpus, nodes=-(-gpus // PER_MACHINE), memory=gpu.memory)
        need = partial(
            memory_of_step,
            model,
            sequence_length=row,
            world_size=gpus,
            nodes=machine.nodes,
            counted=counted,
        )
        module = _first_fit(start, machine, need, gpu.budget)
        if module is not None:
            return PresetOptions(
                preset=name,
                gpu=gpu,
                gpus=gpus,
                nodes=machine.nodes,
                sequence_length=row,
                module=module,
                memory=need(module).total,
                accumulates=need(module, micro_batches=2).total <= gpu.budget,
            )
        gpus *= 2
    return None


def _first_fit(
    start: TransformerTrainModuleConfig,
    machine: Machine,
    need: Callable[[TransformerTrainModuleConfig], Memory],
    budget: int,
) -> TransformerTrainModuleConfig | None:
    """Return the options that fit this many GPUs, None if there are none.

    Args:
        start: with micro-batches of a row.
        need: what a rank needs with some options.
    """
    row, ways = start.rank_microbatch_size, list(_ways(machine, start))
    if need(ways[-1]).total > budget:
        return None  # the last one needs the least
    for tokens in dict.fromkeys((max(row, ENOUGH_TOKENS), row)):
        for way in ways:
            fitting = None
            while tokens <= max(row, MOST_TOKENS):
                larger = replace(way, rank_microbatch_size=tokens)
                if need(larger).total > budget:
                    break
                fitting, tokens = larger, 2 * tokens
            if fitting is not None:
                return fitting
    return None


def _ways(
    machine: Machine, start: TransformerTrainModuleConfig
) -> Iterator[TransformerTrainModuleConfig]:
    """Yield options, the cheapest in time first, the one that needs the least memory last."""
    shares = [start.dp_config]
    if machine.world_size > 1:
        shares = [config for _, config in candidates(machine, start.dp_config)]
    for mode in CHECKPOINTING:
        for dp_config in shares:
            for loss in LOSSES:
                if not dp_config.cpu_offload:
                    yield replace(
                        start,
                        dp_config=dp_config,
                        ac_config=ActivationCheckpointingConfig(mode=mode),
                        loss=LossConfig(name=loss),
                    )


@cache
def counted_tensors(model: DecoderConfig) -> TrainingTensors:
    """Return the tensors of a model and of AdamW."""
    return TrainingTensors.count(model, AdamWConfig())


def _model(name: str, gpu: Gpu) -> DecoderConfig:
    backend = {"backend": _attention(gpu)}
    return preset(name, vocab_size=PRESETS[name].vocab_size, attention=backend)


def _attention(gpu: Gpu) -> str:
    return ATTENTION if gpu.modern else OLD_ATTENTION
