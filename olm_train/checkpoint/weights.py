"""The weights of a checkpoint: as a model on the CPU, and as a folder of safetensors.

    config.json -> shape, no larger than the tensors there -> Decoder <- tensors of a checkpoint
    checkpoint  -> model.safetensors, tokenizer.json, mixture.lock.json, config.json
                   run.json (configuration of its run)

The format of that folder is `olm_train/model/weights_folder.py`, which `model.save` writes too.
Never: a pickle, an optimiser, or a path.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import torch

from olm_data.model_folder import About
from olm_data.storage.store import Store, absolute
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import CONFIG, LOCK, TOKENIZER
from olm_train.checkpoint.model_format import ForeignModel
from olm_train.distributed.world import World
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.load import model_of, parse_model, refuse_size
from olm_train.model.weights_folder import MODEL, SUFFIX, Exported, kept, write_folder

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
    return parse_model(checkpoint.config(), where, known=known, trust=trust)


def evaluation_model(
    source: Checkpoint | Exported | ForeignModel,
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
    if isinstance(source, Exported):
        model = model_of(
            source, classes=classes, trust=trust, vocab_multiple=1, attention=_ANYWHERE
        )
        return model.float()
    config, entries = model_config(source, trust=trust), source.index.tensors.items()
    held = sum(entry.elements for name, entry in entries if name.startswith("model."))
    refuse_size(config, held, source.folder)
    model = build_decoder(config.changed(attention=_ANYWHERE), dtype=torch.float32)
    own = {name: value.data for name, value in model.named_parameters()}
    source.load_tensors({"model": own}, World())
    return model.eval()


def export(checkpoint: Checkpoint, output: str | os.PathLike[str], *, trust: bool = False) -> About:
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
