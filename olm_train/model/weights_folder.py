"""A folder with the weights of a model, and what it takes to make it again: no pickle.

    model, tokenizer -> model.safetensors, tokenizer.json, ...
                        config.json: classes and shape of the model, and size and sha256 of each
                        of these files, in the place of the one before: from then on they count

A folder may be written over, also where the writer is killed: a name whose file has another content
so far is written as NAME-<sha256>.EXT first, and `config.json` then names that. So whoever reads
it finds the model before or the one after, whole.

Names, shapes and values are those of the model; the rows that pad a vocabulary are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from olm_data.bounded_json import sha256_file
from olm_data.config.convert import as_dict
from olm_data.config.import_path import import_path
from olm_data.dataset.tokenizer import TOKENIZER
from olm_data.errors import ConflictError, InputError, UsageError, ValidationError, printable
from olm_data.model_folder import CONFIG, ExportedFile, FolderConfig, read_about
from olm_data.storage.disk import io_errors, write_durable
from olm_data.storage.store import Store, absolute
from olm_train.model.config import VOCABULARY_TABLES, DecoderConfig

MODEL, SUFFIX = "model.safetensors", ".safetensors"
ASIDE = r"\.[0-9a-f]{16}"


@dataclass(frozen=True)
class ExportedWeights:
    """What lies in such a folder.

    Attributes:
        store: the folder.
        about: its `config.json`.
        weights: by name of the parameter, on the CPU.
    """

    store: Store
    about: FolderConfig
    weights: dict[str, Tensor]

    def read_bytes(self, name: str) -> bytes | None:
        """Return the bytes of a file beside the weights, None when there is no such file.

        Raises:
            ValidationError: it is another one than `config.json` says.
        """
        for entry in self.about.carried:
            if entry.file == name:
                return _read(self.store, entry)
        return None


def kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what is saved of a model: its parameters and persistent buffers, each once."""
    state = model.state_dict()
    yield from model.named_parameters()
    yield from ((name, value) for name, value in model.named_buffers() if name in state)


def save_model(
    model: nn.Module, config: DecoderConfig, folder: str | os.PathLike[str], tokenizer: object
) -> FolderConfig:
    """Write a model as `Decoder.save` says."""
    tensors = dict(kept(model))
    if any(value.is_meta or hasattr(value, "placements") for value in tensors.values()):
        raise UsageError(
            "this process does not hold the whole weights",
            where=os.fspath(folder),
            why="they are sharded over ranks, or have no values yet",
            fix="save a checkpoint, and turn it into such a folder with olm-train export",
        )
    data = None if tokenizer is None else tokenizer_bytes(tokenizer)
    return write_folder(
        Store(absolute(os.fspath(folder)).rstrip("/")),
        config=config,
        model_class=type(model),
        tensors={name: value.detach().cpu() for name, value in tensors.items()},
        carried={} if data is None else {TOKENIZER: data},
    )


def tokenizer_bytes(tokenizer: object) -> bytes:
    """Return the tokenizer.json of a tokenizer.

    Args:
        tokenizer: of the library tokenizers, one of transformers that is made of it, one of
            `olm_data`, or the path of a tokenizer.json.

    Raises:
        UsageError: it is none of these.
    """
    plain = getattr(tokenizer, "json_bytes", None)  # of olm_data
    if isinstance(plain, bytes):
        return plain
    for each in (tokenizer, getattr(tokenizer, "backend_tokenizer", None)):
        if hasattr(each, "to_str"):
            text: str = each.to_str()
            return text.encode()
    if isinstance(tokenizer, str | os.PathLike):
        path = Path(tokenizer)
        file = path / TOKENIZER if path.is_dir() else path
        return Store(str(file.absolute().parent)).read(file.name)
    raise UsageError(
        f"a {type(tokenizer).__name__} is no tokenizer that can be saved",
        where="tokenizer",
        fix="give one of the library tokenizers, or the path of a tokenizer.json",
    )


def write_folder(
    store: Store,
    *,
    config: DecoderConfig,
    model_class: type,
    tensors: Mapping[str, Tensor],
    carried: Mapping[str, bytes],
    name: str = MODEL,
    step: int | None = None,
    lock_digest: str | None = None,
) -> FolderConfig:
    """Write weights and what belongs to them; in place of such a model that the folder holds.

    Args:
        store: the folder.
        config: shape of the model.
        model_class: its class, called with the shape.
        tensors: whole, on the CPU; with the rows that pad a vocabulary.
        carried: other files, by name.
        name: of the safetensors file.
        step, lock_digest: of the checkpoint they are from.

    Raises:
        ConflictError: something else in the folder would be written over, such as the
            configuration of a run.
        ResourceError, StorageError: it cannot be written.
    """
    _refuse_others(store, carried)
    values = {
        key: (value[: config.vocab_size] if key in VOCABULARY_TABLES else value).contiguous()
        for key, value in tensors.items()
    }
    metadata = {"format": "pt"} | ({} if step is None else {"olm_step": str(step)})
    store.clear_staging()  # of a writer that was killed
    with store.staging() as staging, io_errors(store.root, writing=True):
        save_file(values, staging / name, metadata=metadata)
        with open(staging / name, "rb") as file:
            os.fsync(file.fileno())
        for other, data in carried.items():
            write_durable(staging / other, data)
        weights, *others = (_entry(staging / each) for each in (name, *carried))
        about = FolderConfig(
            model=as_dict(config),
            model_class=import_path(model_class),
            config_class=import_path(type(config)),
            step=step,
            parameters=sum(value.numel() for value in values.values()),
            lock_digest=lock_digest,
            weights=weights,
            carried=tuple(others),
        )
        _publish(store, staging, about)
    return about


def _refuse_others(store: Store, carried: Mapping[str, bytes]) -> None:
    """Refuse a folder that holds files of these names which no earlier such model brought."""
    held = {entry.file for entry in _held(store)}
    others = [CONFIG] if not held and store.exists(CONFIG) else []
    for name, data in carried.items():
        if name not in held and store.exists(name) and store.read(name) != data:
            others.append(name)
    if others:
        raise ConflictError(
            f"the folder holds {' and '.join(others)} of something else",
            where=store.root,
            why="the model's would be written over it",
            fix="give a new folder",
        )


def _entry(path: Path) -> ExportedFile:
    return ExportedFile(file=path.name, bytes=path.stat().st_size, sha256=sha256_file(path))


def _publish(store: Store, staging: Path, about: FolderConfig) -> None:
    """Put staged files in their places, so that `config.json` is right at every moment.

    What stands in the place of another is first beside it, where `_read` looks.
    """
    before = {entry.file for entry in _held(store)}
    for entry in about.files:
        name = entry.file
        if name in before:
            name = _aside(entry)
            os.link(staging / entry.file, staging / name)
        store.publish(name, staging / name, entry.sha256)
    store.put(CONFIG, json.dumps(msgspec.to_builtins(about), indent=1).encode() + b"\n")
    now = {entry.file: entry for entry in about.files}
    for file in before & now.keys():
        store.publish(file, staging / file, now[file].sha256)
    beside = {
        name
        for file in before
        for name in store.sizes(f"{file}.")
        if re.fullmatch(ASIDE, name.removeprefix(file))
    }
    for file in beside | before - now.keys():
        store.delete(file)


def _aside(entry: ExportedFile) -> str:
    """Return where a file is while another one is in its place."""
    return f"{entry.file}.{entry.sha256[:16]}"


def _held(store: Store) -> tuple[ExportedFile, ...]:
    """Return the files that the folder's `config.json` names, none where it is none of ours."""
    try:
        return read_about(store).files
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return ()


def is_exported(place: str) -> bool:
    """Whether `place` holds exported weights: the file, or a folder with one."""
    return place.endswith(SUFFIX) or Store(place).exists(MODEL)


def load_exported(place: str) -> ExportedWeights:
    """Return saved or exported weights, on the CPU, and what lies beside them.

    Raises:
        InputError: there are none.
        ValidationError: a file is another one than `config.json` says, or of another version.
    """
    folder, name = os.path.split(place) if place.endswith(SUFFIX) else (place, MODEL)
    store = Store(folder or str(Path.cwd()))
    try:
        about = read_about(store)
        data = _read(store, msgspec.structs.replace(about.weights, file=name))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "there are no exported weights",
            where=store.url(name),
            fix=f"give the {name} that `olm-train export` or model.save wrote, {CONFIG} beside it",
        ) from error
    try:
        return ExportedWeights(store, about, load(data))
    except SafetensorError as error:
        raise ValidationError(
            f"the weights are damaged: {printable(str(error))[:200]}", where=store.url(name)
        ) from error


def _read(store: Store, entry: ExportedFile) -> bytes:
    aside = _aside(entry)  # of a process that was killed in `_publish`
    data = store.read(aside if store.exists(aside) else entry.file, limit=entry.bytes)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ValidationError(
            f"{printable(entry.file)} is not the one that was exported: its sha256 differs",
            where=store.url(entry.file),
        )
    return data
