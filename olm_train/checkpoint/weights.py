"""The weights of a model alone: out of a checkpoint, as one safetensors file, and back.

    checkpoint -> load_model -> Decoder -> export -> model.safetensors + config.json
                                                  -> load_exported -> {parameter: tensor}

Names, shapes and values are those of our own decoder; nothing is transposed or renamed. The rows
that pad the vocabulary, zeros that no logit comes from, are left out, and put back by `padded`.
Never: a pickle, or an optimiser.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from olm_data.canonical import sha256_file
from olm_data.errors import InputError, UsageError, ValidationError, printable
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import CONFIG
from olm_train.checkpoint.migrate import migrated_config
from olm_train.config import Values, as_dict, parse
from olm_train.model.decoder import Decoder, DecoderConfig
from olm_train.model.init import VOCABULARY_TABLES
from olm_train.world import World

MODEL = "model.safetensors"
SUFFIX = ".safetensors"
FORMAT, VERSION = "olm-model", 1


def model_config(checkpoint: Checkpoint) -> DecoderConfig:
    """Return the shape of a checkpoint's model; fields it does not know have their defaults.

    Raises:
        ValidationError: this program does not know such a model.
    """
    try:
        config = migrated_config(checkpoint.read_json(CONFIG) or {}, checkpoint.manifest.version)
        values = Values(config, file=f"{checkpoint.folder}/{CONFIG}")
        return parse(DecoderConfig, values, ("model",))
    except UsageError as error:
        raise ValidationError(
            f"this program does not know the model of the checkpoint: {error.what}",
            where=error.where,
            fix="use the program that wrote it, or a newer one",
        ) from error


def load_model(checkpoint: Checkpoint) -> Decoder:
    """Return the model of a checkpoint on the CPU, in fp32, without its optimiser."""
    # Every back-end computes the same function of the weights; this one runs in fp32 on a CPU.
    model = replace(model_config(checkpoint), attention="sdpa").build(dtype=torch.float32)
    tensors = {"model": {name: value.data for name, value in model.named_parameters()}}
    checkpoint.load_tensors(tensors, World())
    return model.eval()


def export(checkpoint: Checkpoint, output: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the whole, unsharded weights as one safetensors file, and `config.json` beside it.

    Args:
        checkpoint: of any number of ranks and any strategy.
        output: `.../model.safetensors`, or a folder for it; local or remote.

    Returns:
        What `config.json` holds: format, model, step, digests of lock and weights.

    Raises:
        ResourceError, StorageError: it cannot be written.
    """
    text = absolute(os.fspath(output))
    folder, name = os.path.split(text) if text.endswith(SUFFIX) else (text.rstrip("/"), MODEL)
    model, store = load_model(checkpoint), Store(folder)
    tensors = {
        name: value.data[: model.config.vocab_size].contiguous()
        if name in VOCABULARY_TABLES
        else value.data.contiguous()
        for name, value in model.named_parameters()
    }
    with store.staging() as staging, io_errors(folder, writing=True):
        path = staging / name
        save_file(tensors, path, metadata={"format": "pt", "olm_step": str(checkpoint.step)})
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sha256 = sha256_file(path)
        store.publish(name, path, sha256)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "model": as_dict(model_config(checkpoint)),
        "step": checkpoint.step,
        "parameters": sum(value.numel() for value in tensors.values()),
        "lock_digest": checkpoint.manifest.lock_digest,
        "weights": {"file": name, "bytes": store.size(name), "sha256": sha256},
    }
    store.put(CONFIG, json.dumps(about, indent=1).encode() + b"\n")
    return about


def is_exported(place: str) -> bool:
    """Whether `place` is what `export` wrote: the file, or a folder with one."""
    return place.endswith(SUFFIX) or Store(place).exists(MODEL)


def load_exported(place: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights that `export` wrote, on the CPU, and what `config.json` says of them.

    Raises:
        InputError: there are none.
        ValidationError: the file is another one than `config.json` says, or of another version.
    """
    folder, name = os.path.split(place) if place.endswith(SUFFIX) else (place, MODEL)
    store = Store(folder)
    try:
        about, data = json.loads(store.read(CONFIG)), store.read(name)
        version = (about["format"], about["version"])
        expected = about["weights"]["sha256"] if version == (FORMAT, VERSION) else None
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "there are no exported weights",
            where=store.url(name),
            fix=f"give the {name} that `python -m olm_train.export` wrote, {CONFIG} beside it",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValidationError("this is no exported model", where=store.url(CONFIG)) from error
    if expected is None:
        raise ValidationError(
            f"these weights are {printable(str(version[0]))} version {printable(str(version[1]))}; "
            f"this program reads {FORMAT} version {VERSION}",
            where=store.url(CONFIG),
            fix="use the program that wrote them, or a newer one",
        )
    if hashlib.sha256(data).hexdigest() != expected:
        raise ValidationError(
            "the weights are not those that were exported: their sha256 differs",
            where=store.url(name),
        )
    try:
        return load(data), about
    except SafetensorError as error:
        raise ValidationError(f"the weights are damaged: {error}", where=store.url(name)) from error


def padded(weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return exported weights with the vocabulary padded as `config` says."""
    pads = (0, 0, 0, config.padded_vocab_size - config.vocab_size)
    return {
        name: F.pad(value, pads) if name in VOCABULARY_TABLES else value
        for name, value in weights.items()
    }
