"""The train module of a model that is there: a decoder's own, or one for any module.

model, optimiser, data, hardware -> bytes of each way to share it -> choice -> train module
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from olm_data.bounded_json import JsonObject
from olm_data.errors import UsageError
from olm_data.run_log.metric_names import LABELS
from olm_train.data.base import DataLoaderBase
from olm_train.data.batch import batch_words, refuse_copying
from olm_train.data.loader import DataLoader
from olm_train.distributed.world import World
from olm_train.estimate.device_defaults import Capability, resolve
from olm_train.estimate.sharding import Need, need_of_decoder
from olm_train.extensions.any_model.train_module import BasicTrainModule, Loss, refuse_unfit
from olm_train.extensions.any_model.wrapping import units
from olm_train.extensions.auto.loader import micro_batches
from olm_train.extensions.auto.strategy import Choice, DeviceConfig, Preset
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.loss import count_valid
from olm_train.model.loss_config import LossConfig
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.given import OptimizerLike, given_optim
from olm_train.optim.schedule_base import LRSchedule
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.config import DataParallelConfig
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_base import TrainModule
from olm_train.train_module_config import TransformerTrainModuleConfig

UNIT = 10**8
"""Parameters that are gathered as a whole, at most, if nothing is said."""
LEAST_UNITS = 32
"""A model is cut into about so many, at least."""
MOMENTS = 2
"""Tensors that an optimiser is counted to keep of each weight: those of AdamW."""
KNOWN = 0.5
"""Share of a device that is planned with where activations are not known."""

Chosen = Callable[[Need, DataParallelConfig], Choice]
"""(bytes of each way, dtypes) -> how ranks share the weights."""


@dataclass(frozen=True, kw_only=True)
class ModuleParts:
    """What a train module is made of, besides the model.

    Attributes:
        optimizer, options: an instance, or a class and its options.
        schedule: of the rate.
        grad_clip_norm: see `BasicTrainModule.max_grad_norm`.
        loss, wrap_classes, min_num_params: of a module that is no decoder.
        preset: what is chosen for.
        given: dtypes; all options of sharing, if they are not to be chosen.
        loader, context_length: the data, and tokens of a row.
        devices, world, seed: where, with whom, and what is drawn.
    """

    optimizer: OptimizerLike
    options: JsonObject
    schedule: LRSchedule
    grad_clip_norm: float | None
    loss: Loss | None
    wrap_classes: Sequence[type[nn.Module]]
    min_num_params: int | None
    preset: Preset
    given: DataParallelConfig
    loader: DataLoaderBase
    context_length: int | None
    devices: DeviceConfig
    world: World
    seed: int


def train_module_of(
    model: nn.Module, parts: ModuleParts, choose: Chosen
) -> tuple[TrainModule, Choice]:
    """Return the train module of a model, and how its weights are shared.

    Raises:
        UsageError: options that contradict each other, the model or the data.
    """
    if isinstance(model, Decoder):
        return _decoder(model, parts, choose)
    return _any(model, parts, choose)


def _decoder(model: Decoder, parts: ModuleParts, choose: Chosen) -> tuple[TrainModule, Choice]:
    _refuse_for_decoder(parts)
    row = _row_length(model.config, parts.loader, parts.context_length)
    saving = parts.preset == "memory_efficient"
    config = TransformerTrainModuleConfig(
        rank_microbatch_size=_tokens(parts.loader, row, parts.world),
        optim=given_optim(parts.optimizer, model, parts.options),  # type: ignore[arg-type]
        scheduler=parts.schedule,  # type: ignore[arg-type]
        max_grad_norm=parts.grad_clip_norm,
        dp_config=parts.given,
        ac_config=ActivationCheckpointingConfig(mode="full" if saving else "none"),
        loss=LossConfig(name="chunked" if saving else "auto"),
    )
    shape, config, _ = resolve(model.config, config, Capability.of(parts.world.device))
    need = need_of_decoder(
        shape,
        config,
        parts.devices,
        sequence_length=row,
        micro_batches=micro_batches(parts.loader) or 1,
        optim=AdamWConfig(),
    )
    choice = choose(need, config.dp_config)
    config = replace(config, dp_config=choice.dp_config)
    return TransformerTrainModule(config, model, seed=parts.seed, world=parts.world), choice


def _any(model: nn.Module, parts: ModuleParts, choose: Chosen) -> tuple[TrainModule, Choice]:
    refuse_unfit(model, parts.loss or next_token_loss)
    least = parts.min_num_params
    if not parts.wrap_classes and least is None:
        least = unit_size(model)
    inner = units(model, parts.wrap_classes, least)
    count = micro_batches(parts.loader) or 1
    choice = choose(need_of_any(model, inner, parts.devices, micro_batches=count), parts.given)
    kind = NextTokenModule if parts.loss is None else BasicTrainModule
    module = kind(
        model,
        parts.optimizer,
        parts.loss or next_token_loss,
        optim=parts.options,
        world=parts.world,
        scheduler=parts.schedule,
        max_grad_norm=parts.grad_clip_norm,
        dp_config=choice.dp_config,
        wrap_classes=parts.wrap_classes,
        min_num_params=least,
        seed=parts.seed,
    )
    return module, choice


def need_of_any(
    model: nn.Module, units: Sequence[nn.Module], devices: DeviceConfig, *, micro_batches: int
) -> Need:
    """Return the need of any model but for activations, divided by `KNOWN`.

    Args:
        units: what is gathered as a whole, see `wrapping.units`.
    """
    weights = _bytes(model)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    inside = [_bytes(unit) for unit in units]
    largest = max(inside, default=0)

    def need(config: DataParallelConfig) -> int:
        alone = devices.world_size == 1
        shards = config.mesh(devices.world_size, devices.nodes).dp_shard
        own = 0 if config.cpu_offload and not alone else (weights + MOMENTS * trained) / shards
        whole = micro_batches > 1 and not config.reduce_each_microbatch
        gradients = trained if whole else trained / shards
        gathered = 0
        if shards > 1:
            rest = max(weights - sum(inside), 0)
            gathered = weights if config.reshard_after_forward is False else rest + 2 * largest
        return round((own + gradients + gathered) / KNOWN)

    return need


def unit_size(model: nn.Module) -> int:
    """Return the parameters from which on a module is gathered as a whole, if nothing is said."""
    return min(UNIT, max(1, sum(p.numel() for p in model.parameters()) // LEAST_UNITS))


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


class NextTokenModule(BasicTrainModule):
    """A language model of any kind: the loss is the mean over labels, not over rows."""

    counted: ClassVar[str] = LABELS

    def count(self, batch: Any) -> Tensor:
        """Return the number of labels that are not -100."""
        return count_valid(self.parts(batch)[2])

    def parts(self, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any], Any]:
        """Return arguments of the model and next tokens; raises UsageError where there are none."""
        arguments, named, labels = super().parts(batch)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
            raise UsageError(
                "a language model trains on batches whose labels are whole numbers [rows, "
                f"tokens]; the data loader gave {batch_words(batch)}",
                fix="give (input_ids, labels), a mapping with labels, or a loss of your own",
            )
        for given in (*arguments, *named.values()):
            if isinstance(given, Tensor):
                refuse_copying(given, labels)
        return arguments, named, labels


def next_token_loss(output: Any, labels: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats, of logits [b, S, V] at labels [b, S].

    Args:
        output: logits, or what has them as `logits`.
        labels: -100 where there is none.
    """
    logits = getattr(output, "logits", output)  # [b, S, V]
    total = F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return total / count_valid(labels).clamp(min=1)


def _refuse_for_decoder(parts: ModuleParts) -> None:
    given = {
        "loss": parts.loss is not None,
        "wrap_classes": bool(parts.wrap_classes),
        "min_num_params": parts.min_num_params is not None,
    }
    for name, there in given.items():
        if there:
            raise UsageError(
                f"{name} has no effect with a Decoder",
                where=name,
                why="it has a loss of its own, and is gathered block by block",
                fix="leave it out",
            )


def _row_length(model: DecoderConfig, loader: DataLoaderBase, asked: int | None) -> int:
    """Return the tokens of a row, the longest of the run."""
    row = loader.sequence_length if isinstance(loader, DataLoader) else asked
    if row is None:
        raise UsageError(
            "how long the rows are is not known",
            where="context_length",
            why="memory is planned for them",
            fix="give context_length, the tokens of a row",
        )
    if asked is not None and asked != row:
        raise UsageError(
            f"context_length is {asked:,}; the rows of the mixture lock are {row:,} tokens long",
            where="context_length",
            fix=f"give {row}, or leave it out",
        )
    if model.max_positions is not None and model.max_positions < row:
        raise UsageError(
            f"the model has {model.max_positions:,} positions; a row has {row:,} tokens",
            where="context_length",
            fix="give the model more max_positions, or train on shorter rows",
        )
    vocabulary = 0 if loader.lock is None else loader.lock.tokenizer.vocab_size
    if vocabulary > model.vocab_size:
        raise UsageError(
            f"the vocabulary of the model has {model.vocab_size:,} ids, that of the mixture lock "
            f"{vocabulary:,}",
            where="model",
            fix=f"DecoderConfig(vocab_size={vocabulary}, ...)",
        )
    return row


def _tokens(loader: DataLoaderBase, row: int, world: World) -> int:
    """Return the tokens that a rank takes through forward and backward at once, at most."""
    if isinstance(loader, DataLoader):
        return loader.rank_microbatch_size
    size = loader.global_batch_size // (world.size * (micro_batches(loader) or 1))
    return max(size, 1) * (1 if loader.unit == "tokens" else row)
