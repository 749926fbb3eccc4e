"""The model of a checkpoint: its shape, its weights whole and on the CPU.

    config.json -> shape, no larger than the tensors there -> Decoder <- tensors

Never: an optimiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.errors import UsageError, ValidationError
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import CONFIG
from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import VOCABULARY_TABLES


def model_config(checkpoint: Checkpoint) -> DecoderConfig:
    """Return the shape of a checkpoint's model; fields it does not know have their defaults.

    Raises:
        ValidationError: this program does not know such a model.
    """
    return parse_model(checkpoint.config(), f"{checkpoint.folder}/{CONFIG}")


def parse_model(config: dict[str, Any], where: str) -> DecoderConfig:
    """Return the shape of the model that a configuration is of.

    Args:
        config: with the shape under `model`.
        where: its file, for messages.

    Raises:
        ValidationError: this program does not know such a model.
    """
    try:
        return parse(DecoderConfig, Values(config, file=where), ("model",))
    except UsageError as error:
        raise ValidationError(
            f"this program does not know the model of the checkpoint: {error.what}",
            where=error.where,
            fix="use the program that wrote it, or a newer one",
        ) from error


def load_model(checkpoint: Checkpoint) -> Decoder:
    """Return the model of a checkpoint on the CPU, in fp32, without its optimiser."""
    config = model_config(checkpoint)
    entries = checkpoint.index.tensors.items()
    held = sum(entry.elements for name, entry in entries if name.startswith("model."))
    refuse_size(config, held, checkpoint.folder)
    # Every back-end computes the same function of the weights; this one runs in fp32 on a CPU.
    model = Decoder(replace(config, attention="sdpa"), dtype=torch.float32)
    tensors = {"model": {name: value.data for name, value in model.named_parameters()}}
    checkpoint.load_tensors(tensors, World())
    return model.eval()


def refuse_size(config: DecoderConfig, held: int, where: str) -> None:
    """Refuse a shape that would take more memory than the weights that there are.

    Args:
        config: the shape.
        held: elements of the weights.
        where: folder of both.

    Raises:
        ValidationError: it has more parameters.
    """
    tables = 1 if config.tie_embeddings else 2
    pads = tables * (config.padded_vocab_size - config.vocab_size) * config.d_model
    wanted = config.num_params + pads
    if wanted > held:
        raise ValidationError(
            f"the configuration is of a model of {wanted:,} parameters; there are {held:,}",
            where=where,
            fix="do not use this model; restore it from a copy",
        )


def padded(weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return exported weights with the vocabulary padded as `config` says."""
    pads = (0, 0, 0, config.padded_vocab_size - config.vocab_size)
    return {
        name: F.pad(value, pads) if name in VOCABULARY_TABLES else value
        for name, value in weights.items()
    }
