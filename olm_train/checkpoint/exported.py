"""A model as one safetensors file, with what it takes to use it anywhere; and back.

    checkpoint -> model.safetensors
                  tokenizer.json, mixture.lock.json, run.json (configuration of its run)
                  config.json: the model's shape, and size and sha256 of each of the above
               -> load_exported -> Exported

Names, shapes and values are those of our own decoder; nothing is transposed or renamed. The rows
that pad the vocabulary, zeros that no logit comes from, are left out.
Never: a pickle, an optimiser, or a path.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from olm_data.bounded_json import decode_object
from olm_data.canonical import sha256_file
from olm_data.config.convert import as_dict
from olm_data.errors import InputError, ValidationError, printable
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import CONFIG, LOCK, TOKENIZER
from olm_train.checkpoint.weights import load_model, model_config
from olm_train.model.init import VOCABULARY_TABLES

MODEL, RUN = "model.safetensors", "run.json"
SUFFIX = ".safetensors"
FORMAT, VERSION = "olm-model", 2
READABLE = (1, 2)
"""Version 1 had neither tokenizer, lock nor configuration."""


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of an export: name, size and sha256."""

    file: str
    bytes: int
    sha256: str


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `config.json`.

    Attributes:
        model: shape of the model.
        step: of the checkpoint.
        parameters: how many there are.
        lock_digest: of the mixture.
        weights: the safetensors file.
        carried: the other files.
    """

    format: str
    version: int
    model: dict[str, Any]
    step: int
    parameters: int
    lock_digest: str
    weights: ExportedFile
    carried: tuple[ExportedFile, ...] = ()


@dataclass(frozen=True)
class Exported:
    """What lies in a folder that `export` wrote.

    Attributes:
        store: the folder.
        about: its `config.json`.
        weights: by name of the parameter, on the CPU.
    """

    store: Store
    about: About
    weights: dict[str, Tensor]

    def read_bytes(self, name: str) -> bytes | None:
        """Return the bytes of a file beside the weights, None when there is no such file.

        Raises:
            ValidationError: it is another one than `config.json` says.
        """
        for entry in self.about.carried:
            if entry.file == name:
                return _read(self.store, name, entry)
        return None


def export(checkpoint: Checkpoint, output: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the whole, unsharded weights as one safetensors file, and what belongs to them.

    Args:
        checkpoint: of any number of ranks and any strategy.
        output: `.../model.safetensors`, or a folder for it; local or remote.

    Returns:
        What `config.json` holds.

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
        weights = ExportedFile(file=name, bytes=path.stat().st_size, sha256=sha256_file(path))
        store.publish(name, path, weights.sha256)
    carried = []
    for there, here in ((TOKENIZER, TOKENIZER), (LOCK, LOCK), (CONFIG, RUN)):
        data = checkpoint.read_bytes(there)
        if data is not None:
            store.put(here, data)
            sha256 = hashlib.sha256(data).hexdigest()
            carried.append(ExportedFile(file=here, bytes=len(data), sha256=sha256))
    about: dict[str, Any] = msgspec.to_builtins(
        About(
            format=FORMAT,
            version=VERSION,
            model=as_dict(model_config(checkpoint)),
            step=checkpoint.step,
            parameters=sum(value.numel() for value in tensors.values()),
            lock_digest=checkpoint.manifest.lock_digest,
            weights=weights,
            carried=tuple(carried),
        )
    )
    store.put(CONFIG, json.dumps(about, indent=1).encode() + b"\n")
    return about


def is_exported(place: str) -> bool:
    """Whether `place` is what `export` wrote: the file, or a folder with one."""
    return place.endswith(SUFFIX) or Store(place).exists(MODEL)


def load_exported(place: str) -> Exported:
    """Return the weights that `export` wrote, on the CPU, and what lies beside them.

    Raises:
        InputError: there are none.
        ValidationError: a file is another one than `config.json` says, or of another version.
    """
    folder, name = os.path.split(place) if place.endswith(SUFFIX) else (place, MODEL)
    store = Store(folder or str(Path.cwd()))
    try:
        about = _about(store)
        data = _read(store, name, about.weights)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "there are no exported weights",
            where=store.url(name),
            fix=f"give the {name} that `olm-train export` wrote, {CONFIG} beside it",
        ) from error
    try:
        return Exported(store, about, load(data))
    except SafetensorError as error:
        raise ValidationError(
            f"the weights are damaged: {printable(str(error))[:200]}", where=store.url(name)
        ) from error


def _about(store: Store) -> About:
    where = store.url(CONFIG)
    try:
        value = decode_object(store.read(CONFIG))
        found, version = value["format"], value["version"]
        if found == FORMAT and version in READABLE:
            return msgspec.convert(value, About)
    except (ValueError, KeyError, TypeError) as error:  # msgspec's are ValueErrors
        if isinstance(error, ValidationError):
            raise
        raise ValidationError("this is not an exported model", where=where) from error
    known = " and ".join(str(number) for number in READABLE)
    raise ValidationError(
        f"these weights are {printable(str(found))} version {printable(str(version))}; "
        f"this program reads {FORMAT} versions {known}",
        where=where,
        fix="use the program that wrote them, or a newer one",
    )


def _read(store: Store, name: str, entry: ExportedFile) -> bytes:
    data = store.read(name, limit=entry.bytes)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ValidationError(
            f"{printable(name)} is not the one that was exported: its sha256 differs",
            where=store.url(name),
        )
    return data
