"""A trained model and what it takes to use it, out of whatever holds one, wherever it was copied.

    run or checkpoint (newest that verifies) --+-> Portable: shape, weights, tokenizer, lock
    export --------------------------------- --+

Never: open the data that the model was trained on; it may be gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.carried import open_tokenizer
from olm_train.checkpoint.exported import Exported, is_exported, load_exported
from olm_train.checkpoint.load import Checkpoint, find_checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import LOCK, MANIFEST, TOKENIZER, folder_name
from olm_train.checkpoint.weights import load_model, parse_model, refuse_size
from olm_train.distributed.world import World
from olm_train.model.decoder import Decoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Portable:
    """A trained model that needs nothing but its own folder.

    Attributes:
        source: the checkpoint or the export.
        name: of the checkpoint's folder, or of the file of weights.
        step: optimiser steps it was trained.
        lock: mixture it was trained on.
    """

    source: Checkpoint | Exported
    name: str
    step: int
    lock: Lock

    @property
    def folder(self) -> str:
        """Path or URL of its folder."""
        return self.source.store.root

    def tokenizer(self) -> Tokenizer:
        """Return its tokenizer.

        Raises:
            InputError: it holds none.
            ValidationError: it is another one than that of its lock.
        """
        return open_tokenizer(self.source.read_bytes(TOKENIZER), self.lock, self.folder)

    def model(self) -> Decoder:
        """Return the model on the CPU, in fp32, for evaluation.

        Raises:
            ValidationError: shape and weights do not fit each other, or the lock knows more ids
                than the model.
        """
        if isinstance(self.source, Checkpoint):
            model = load_model(self.source)
        else:
            model = _built(self.source)
        rule = self.lock.tokenizer
        for used in (rule.vocab_size - 1, rule.bos or 0, rule.eos or 0):
            if not 0 <= used < model.config.vocab_size:
                raise ValidationError(
                    f"the tokenizer of the lock has the id {used:,}, and the model knows "
                    f"{model.config.vocab_size:,} ids",
                    where=self.folder,
                )
        return model


def open_portable(
    place: str | os.PathLike[str], name: str, on_damage: Callable[[OlmError], None]
) -> Portable:
    """Open the model at `place`.

    Args:
        place: folder of a run, checkpoint or export, or its safetensors file; local or remote.
        name: of a run the step or folder name of a checkpoint, or `latest`.
        on_damage: told about each newer checkpoint that does not verify.

    Raises:
        InputError: there is no such model, or it holds no lock.
        UsageError: `name` has no effect.
        ValidationError: it is damaged.
    """
    text = absolute(os.fspath(place)).rstrip("/")
    if is_exported(text):
        if name != "latest":
            raise UsageError(
                f"an exported model has no checkpoint {name}",
                where=text,
                fix="leave --checkpoint out, or give the save folder of the run",
            )
        exported = load_exported(text)
        step, file = exported.about.step, exported.about.weights.file
        return Portable(exported, file, step, _lock(exported))
    checkpoint = _find(text, name, on_damage)
    return Portable(checkpoint, checkpoint.name, checkpoint.step, _lock(checkpoint))


def _lock(source: Checkpoint | Exported) -> Lock:
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


def _built(exported: Exported) -> Decoder:
    where = exported.store.root
    config = replace(
        parse_model({"model": exported.about.model}, where), attention="sdpa", vocab_multiple=1
    )
    refuse_size(config, sum(value.numel() for value in exported.weights.values()), where)
    model = Decoder(config, dtype=torch.float32)
    wanted = {name: value.data for name, value in model.named_parameters()}
    if {n: v.shape for n, v in wanted.items()} != {n: v.shape for n, v in exported.weights.items()}:
        raise ValidationError("the weights are not those of the model in config.json", where=where)
    for name, value in wanted.items():
        value.copy_(exported.weights[name])
    return model.eval()
