"""A trained model and what it takes to use it, out of whatever holds one, wherever it was copied.

    run or checkpoint (newest that verifies) --------+
    export, or what model.save wrote ----------------+-> Portable: shape, weights, tokenizer, lock
    of transformers: folder, bucket, hf://ORG/NAME --+

The one way to name a model to a command.

Weights of a checkpoint come as a model on the CPU, or as a folder of safetensors:

    config.json -> shape, no larger than the tensors there -> Decoder <- tensors of a checkpoint
    checkpoint  -> model.safetensors, tokenizer.json, mixture.lock.json, config.json
                   run.json (configuration of its run)

The format of that folder is `olm_train/model/weights_folder.py`, which `model.save` writes too.
Never: a pickle, an optimiser, or a path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.model_folder import FolderConfig
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.documents import open_tokenizer
from olm_train.checkpoint.load import Checkpoint, find_checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import CONFIG, LOCK, MANIFEST, TOKENIZER, folder_name
from olm_train.checkpoint.model_format import ForeignModel, format_of
from olm_train.checkpoint.text_rules import CHAT_TEMPLATE, TextRules
from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.load import model_of, parse_model, refuse_size
from olm_train.model.weights_folder import (
    MODEL,
    SUFFIX,
    ExportedWeights,
    is_exported,
    kept,
    load_exported,
    write_folder,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


RUN = "run.json"
_ANYWHERE = {"backend": "sdpa"}


def model_config(
    checkpoint: Checkpoint, *, known: Collection[str] = (), trust: bool = False
) -> DecoderConfig:
    """Return the shape of a checkpoint's model; fields it does not know have their defaults.

    Arguments as of `parse_model`.

    Raises:
        InputError: it is of somebody's own class, and not trusted.
        ValidationError: this program does not know such a model.
    """
    where = f"{checkpoint.folder}/{CONFIG}"
    return parse_model(checkpoint.config, where, known=known, trust=trust)


def evaluation_model(
    source: Checkpoint | ExportedWeights | ForeignModel,
    *,
    classes: Iterable[type] = (),
    trust: bool = False,
) -> Decoder:
    """Return a model on the CPU, in fp32, for evaluation.

    Every attention back-end computes the same function of the weights; this one runs on a CPU.

    Args:
        source: a checkpoint, a folder of weights, or a model of another program.
        classes, trust: of one's own that the model may be of, see `load_model`.

    Raises:
        ValidationError: shape and weights do not fit each other.
    """
    if isinstance(source, ForeignModel):
        return source.build(torch.float32, attention=_ANYWHERE)
    if isinstance(source, ExportedWeights):
        model = model_of(
            source, classes=classes, trust=trust, vocab_multiple=1, attention=_ANYWHERE
        )
        return model.float()
    config, entries = model_config(source, trust=trust), source.index.tensors.items()
    held = sum(entry.elements for name, entry in entries if name.startswith("model."))
    refuse_size(config, held, source.folder)
    model = build_decoder(config.changed(attention=_ANYWHERE), dtype=torch.float32)
    own = {name: value.data for name, value in kept(model)}
    source.load_tensors({"model": own}, World())
    return model.eval()


def export(
    checkpoint: Checkpoint, output: str | os.PathLike[str], *, trust: bool = False
) -> FolderConfig:
    """Write the whole, unsharded weights as one safetensors file, and what belongs to them.

    Args:
        checkpoint: of any number of ranks and any strategy.
        output: `.../model.safetensors`, or a folder for it; local or remote.
        trust: import the class of the model, if it is somebody's own.

    Returns:
        What `config.json` holds.

    Raises:
        ResourceError, StorageError: it cannot be written.
    """
    text = absolute(os.fspath(output))
    folder, name = os.path.split(text) if text.endswith(SUFFIX) else (text.rstrip("/"), MODEL)
    model = evaluation_model(checkpoint, trust=trust)
    beside = ((TOKENIZER, TOKENIZER), (LOCK, LOCK), (CONFIG, RUN))
    found = {here: checkpoint.read_bytes(there) for there, here in beside}
    return write_folder(
        Store(folder),
        config=model_config(checkpoint, trust=trust),
        model_class=type(model),
        tensors={name: value.data for name, value in kept(model)},
        carried={here: data for here, data in found.items() if data is not None},
        name=name,
        step=checkpoint.step,
        lock_digest=checkpoint.manifest.lock_digest,
    )


NO_TEXT = "text cannot be made into token ids, nor token ids into text"


@dataclass(frozen=True)
class TrainedModel:
    """A trained model that needs nothing but its own folder.

    Attributes:
        source: the checkpoint, the export, or the model of transformers.
        name: of the checkpoint's folder, or of the file of weights; of a model of transformers of
            its folder, or `ORG/NAME@COMMIT`.
        step: optimiser steps it was trained; None: nobody recorded it.
        recorded_lock: mixture it was trained on; None: nobody recorded it.
        trust: import classes of its own by the path that it gives.
    """

    source: Checkpoint | ExportedWeights | ForeignModel
    name: str
    step: int | None
    recorded_lock: Lock | None
    trust: bool = False

    @property
    def folder(self) -> str:
        """Path or URL of its folder."""
        return (
            self.source.place if isinstance(self.source, ForeignModel) else self.source.store.root
        )

    def tokenizer_json(self) -> bytes | None:
        """Return the bytes of its `tokenizer.json`, None where there is none."""
        if isinstance(self.source, ForeignModel):
            return self.source.tokenizer_json()
        return self.source.read_bytes(TOKENIZER)

    def tokenizer(self) -> Tokenizer:
        """Return its tokenizer.

        Raises:
            InputError: it holds none.
            ValidationError: it is another one than that of its lock.
        """
        data = self.tokenizer_json()
        if data is None and isinstance(self.source, ForeignModel):
            raise self.source.no_tokenizer(NO_TEXT)
        return open_tokenizer(data, self.recorded_lock, self.folder)

    def rules(self, tokenizer: Tokenizer) -> TextRules:
        """Return how its texts begin and end, and its chat template.

        Args:
            tokenizer: its own.

        Raises:
            InputError, ValidationError: as `ForeignModel.rules`.
        """
        if isinstance(self.source, ForeignModel):
            return self.source.rules(tokenizer)
        if self.recorded_lock is None:
            return TextRules.of_tokenizer(tokenizer)
        data = self.source.read_bytes(CHAT_TEMPLATE)
        return TextRules.of_lock(
            tokenizer, self.recorded_lock, None if data is None else data.decode(errors="replace")
        )

    def model(self) -> Decoder:
        """Return the model on the CPU, in fp32, for evaluation.

        Raises:
            ValidationError: shape and weights do not fit each other, or the lock knows more ids
                than the model.
        """
        model = evaluation_model(self.source, trust=self.trust)
        if self.recorded_lock is None:
            return model
        rule = self.recorded_lock.tokenizer
        for used in (rule.vocab_size - 1, rule.bos or 0, rule.eos or 0):
            if not 0 <= used < model.config.vocab_size:
                raise ValidationError(
                    f"the tokenizer of the lock has the id {used:,}, and the model knows "
                    f"{model.config.vocab_size:,} ids",
                    where=self.folder,
                )
        return model


def open_portable(
    place: str | os.PathLike[str],
    name: str,
    on_damage: Callable[[OlmError], None],
    *,
    trust: bool = False,
) -> TrainedModel:
    """Open the model at `place`.

    Args:
        place: folder of a run, checkpoint or export, or its safetensors file, or of a model of
            transformers; local or remote, or `hf://ORG/NAME[@REVISION]`.
        name: of a run the step or folder name of a checkpoint, or `latest`.
        on_damage: told about each newer checkpoint that does not verify.
        trust: import classes of its own by the path that it gives, see `load_model`.

    Raises:
        InputError: there is no such model, our decoder cannot be it, or it holds no lock.
        UsageError: `name` has no effect.
        ValidationError: it is damaged.
    """
    text = os.fspath(place)
    foreign = format_of(text)
    text = absolute(text).rstrip("/") if foreign is None else foreign.pinned(text)
    if foreign is not None or is_exported(text):
        if name != "latest":
            raise UsageError(
                f"there is no checkpoint {name}: this is not a run",
                where=text,
                fix="leave --checkpoint out, or give the save folder of the run",
            )
        if foreign is not None:
            opened = foreign.open(text)
            return TrainedModel(opened, opened.name, None, None)
        exported = load_exported(text)
        step, file = exported.about.step, exported.about.weights.file
        saved = exported.about.lock_digest is None  # by model.save, which knows no mixture
        return TrainedModel(exported, file, step, None if saved else _lock(exported), trust)
    checkpoint = _find(text, name, on_damage)
    return TrainedModel(checkpoint, checkpoint.name, checkpoint.step, _lock(checkpoint), trust)


def _lock(source: Checkpoint | ExportedWeights) -> Lock:
    folder, data = source.store.root, source.read_bytes(LOCK)
    if data is None:
        raise InputError(
            f"there is no {LOCK} with this model",
            where=folder,
            why="what its token ids mean is not known",
            fix="export it again from its checkpoint",
        )
    return Lock.decode(data, f"{folder}/{LOCK}")


def _find(save_folder: str, name: str, on_damage: Callable[[OlmError], None]) -> Checkpoint:
    if name == "latest":
        return find_checkpoint(save_folder, World(), on_damage)
    place = f"{save_folder}/{folder_name(int(name)) if name.isdigit() else name}"
    if not Store(place).exists(MANIFEST):
        raise InputError(
            f"there is no checkpoint {name}",
            where=save_folder,
            fix="give a step, a folder name such as step00000100, or latest",
        )
    return open_checkpoint(place, World())
