"""A decoder out of a folder of weights.

    config.json -> classes, allowed? -> shape, no larger than the tensors there -> model <- weights

Making a model of a class runs the code of that class. The project's own are made at once; one of
somebody else's only when the caller names it, or trusts whoever wrote the folder.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_data.bounded_json import JsonObject
from olm_data.config.convert import Config, fields_of, parse, tags_of
from olm_data.config.import_path import import_path, is_import_path, load_class
from olm_data.config.values import Values
from olm_data.dataset.tokenizer import TOKENIZER, prompt_tokenizer
from olm_data.errors import InputError, UsageError, ValidationError, printable
from olm_data.storage.store import absolute
from olm_train.model.config import VOCABULARY_TABLES, DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.flat_form import from_flat
from olm_train.model.presets import PARTS
from olm_train.model.weights_folder import ExportedWeights, kept, load_exported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_PADS = 1 << 28
"""Elements of the rows that pad the vocabulary of a model that is loaded."""


def load_saved(
    folder: str | os.PathLike[str], *, classes: Iterable[type] = (), trust: bool = False
) -> Decoder | tuple[Decoder, Tokenizer]:
    """Return the model that `model.save` or `olm-train export` wrote, on the CPU, in eval mode.

    Weights have the values and dtypes they were saved with.

    Args:
        folder: local or remote; or its safetensors file.
        classes: of one's own that the model and its configuration may be of.
        trust: import other classes by the path in the folder: this runs the installed code of that
            name. Code that lies in the folder itself is never run.

    Returns:
        The model; with its tokenizer, where one was saved with it.

    Raises:
        InputError: there is no model, or it is of a class that is not allowed here.
        ValidationError: it is damaged, or shape and weights do not fit each other.
        UsageError: its class cannot be imported.
    """
    found = load_exported(absolute(os.fspath(folder)).rstrip("/"))
    model = model_of(found, classes=classes, trust=trust)
    data = found.read_bytes(TOKENIZER)
    if data is None:
        return model
    return model, prompt_tokenizer(data, None, found.store.url(TOKENIZER))


def model_of(
    found: ExportedWeights,
    *,
    classes: Iterable[type] = (),
    trust: bool = False,
    **changes: Any,
) -> Decoder:
    """Return the model of a folder, as `load_model`; `changes` replace fields of its shape."""
    where, about = found.store.root, found.about
    known = {import_path(kind): kind for kind in classes}
    model_class = _class(about.model_class, Decoder, known, trust, where)
    config_class = _class(about.config_class, DecoderConfig, known, trust, where)
    config = parse_model({"model": about.model}, where, config_class, known=known, trust=trust)
    config = config.changed(**changes)
    held = sum(value.numel() for value in found.weights.values())
    refuse_size(replace(config, vocab_multiple=1), held, where)
    weights = padded(found.weights, config)
    model = model_class(config, dtype=torch.float32)
    own = dict(kept(model))
    if {n: v.shape for n, v in own.items()} != {n: v.shape for n, v in weights.items()}:
        raise ValidationError("the weights are not those of the model in config.json", where=where)
    for name, value in own.items():
        value.data = weights[name]
    return model.eval()


def _class(path: str, base: type, known: Mapping[str, type], trust: bool, where: str) -> type[Any]:
    found = {import_path(base): base, **known}.get(path)
    if found is not None and issubclass(found, base):
        return found
    _require_trust(path, trust, where)
    return load_class(path, base, where=where, never_from=where)


def _require_trust(path: str, trust: bool, where: str) -> None:
    if not trust:
        raise InputError(
            f"the model is of a class that is not part of this program: {printable(path)[:80]}",
            where=where,
            why="making such a model runs the code of its class",
            fix="give classes=[...] with that class; or, if you trust whoever wrote this model and "
            "have the package of that name installed, trust=True or --trust",
        )


def own_parts(model: JsonObject) -> set[str]:
    """Return the names of parts of a recorded shape that are none of ours."""
    fields = fields_of(DecoderConfig)
    named = {part: model[part].get("name") for part in PARTS if isinstance(model.get(part), dict)}
    return {name for part, name in named.items() if isinstance(name, str)} - {
        name for part in named for name in tags_of(fields[part].hint)
    }


def parse_model(
    config: JsonObject,
    where: str,
    kind: type[DecoderConfig] = DecoderConfig,
    *,
    known: Collection[str] = (),
    trust: bool = False,
) -> DecoderConfig:
    """Return the shape of the model that a configuration is of.

    Args:
        config: with the shape under `model`.
        where: its file, for messages.
        kind: class of the shape.
        known: import paths of parts of one's own that it may have.
        trust: import any class that it names.

    Raises:
        InputError: it names a class, and is not trusted.
        ValidationError: this program does not know such a model.
    """
    model, own = config.get("model"), set[str]()
    if isinstance(model, dict):
        if is_import_path(model.get("name")):
            kind = _class(model["name"], DecoderConfig, {}, trust, where)
            model = {key: value for key, value in model.items() if key != "name"}
        config = {"model": (model := from_flat(model))}
        own = own_parts(model)
        for path in own - {*known}:
            _require_trust(path, trust, where)
            load_class(path, Config, where=where, never_from=where)
    try:
        return parse(kind, Values(config, file=where, imports=bool(own)), ("model",))
    except UsageError as error:
        raise ValidationError(
            f"this program does not know the model of the checkpoint: {error.what}",
            where=error.where,
            fix="use the program that wrote it, or a newer one",
        ) from error


def refuse_size(config: DecoderConfig, held: int, where: str) -> None:
    """Refuse a shape that would take more memory than the weights that there are.

    Args:
        config: the shape.
        held: elements of the weights.
        where: folder of both.

    Raises:
        ValidationError: it has more parameters.
    """
    pads = config.head.tables() * (config.padded_vocab_size - config.vocab_size) * config.d_model
    wanted = config.num_params + pads
    if wanted > held:
        raise ValidationError(
            f"the configuration is of a model of {wanted:,} parameters; there are {held:,}",
            where=where,
            fix="do not use this model; restore it from a copy",
        )


def padded(weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return exported weights with the vocabulary padded as `config` says.

    Raises:
        ValidationError: with more than any model has.
    """
    rows = config.padded_vocab_size - config.vocab_size
    if rows * config.d_model > _MOST_PADS:
        raise ValidationError(
            f"vocab_multiple {config.vocab_multiple:,} pads the vocabulary with {rows:,} rows",
            where="config.json",
            fix="do not use this model; restore it from a copy",
        )
    return {
        name: F.pad(value, (0, 0, 0, rows)) if name in VOCABULARY_TABLES else value
        for name, value in weights.items()
    }
