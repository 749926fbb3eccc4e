"""The shape of a model by other means than its fields: a preset, a depth, or weights that it has.

    trainer.load_path: hf://ORG/NAME | folder --config.json--> fields of `model`, the path pinned
    save_folder with a checkpoint ------------its config.json--> the same; nothing else is opened
    model.preset, model.depth -----------------------------> the same

So `train.yaml` needs no `model`, and a run goes on without the weights that it began with.
"""

from __future__ import annotations

from typing import NamedTuple

from olm_data.bounded_json import JsonObject
from olm_data.config.convert import parse
from olm_data.config.dump import as_dict
from olm_data.config.values import Values
from olm_data.errors import OlmError, UsageError
from olm_data.storage.store import Store
from olm_train.checkpoint.folders import candidates
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import Manifest
from olm_train.checkpoint.model_format import ModelFormat, format_of
from olm_train.checkpoint.policy import LoadPolicy
from olm_train.model.config import DecoderConfig
from olm_train.model.presets import depth_fields, preset_fields


class Derived(NamedTuple):
    """The fields of a shape, and the format of the model that has it."""

    format: ModelFormat
    fields: JsonObject


def derive_model(values: Values, policy: LoadPolicy, save_folder: str, ids: int) -> Derived | None:
    """Return the fields of `model` that follow from `load_path`; None: there is nothing such.

    An address of the hub in `values` becomes that of a commit.

    Args:
        values: of the whole configuration.
        policy: where the run begins.
        save_folder: of the run.
        ids: that the data may hold; 0: not known.

    Raises:
        InputError: our decoder cannot be that model, or there is none.
        UsageError: the vocabulary is too small; or `load_vocabulary` is for such models only.
        StorageError: the hub cannot be reached.
    """
    known = None if policy.path is None else format_of(policy.path)
    if policy.path is None or known is None:
        if policy.vocabulary != "keep":
            raise UsageError(
                "has an effect with a model of transformers alone",
                where=values.where(("trainer", "load_vocabulary")),
                fix="leave it out",
            )
        return None
    begun = _begun(save_folder)
    if begun is not None:
        path = begun.get("trainer", {}).get("load_path")
        if isinstance(path, str) and all(map(known.may_change, (policy.path, path))):
            values.data["trainer"]["load_path"] = path
        model: JsonObject = {**begun["model"]}
        model.pop("attention", None)  # that of the device it ran on
        return Derived(known, model)
    place = known.pinned(policy.path)
    if known.may_change(place):
        values.data["trainer"]["load_path"] = place
    opened = known.open(place)
    shape: JsonObject = as_dict(opened.config)
    shape["vocab_size"] = opened.vocabulary_size(ids, policy.vocabulary)
    return Derived(known, shape)


def named_shape(model: JsonObject, values: Values) -> JsonObject:
    """Return the fields that `preset` or `depth` stands for, and take it out of `model`.

    Raises:
        UsageError: both are given, or one has no meaning.
    """
    given = [name for name in ("preset", "depth") if name in model]
    if len(given) == 2:
        raise UsageError(
            "model.preset and model.depth each give the shape",
            where=values.where(("model", "depth")),
            fix="remove one of the two",
        )
    if not given:
        return {}
    where = values.where(("model", given[0]))
    value = model.pop(given[0])
    try:
        if given[0] == "preset":
            shape = preset_fields(str(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            shape = depth_fields(value)
        else:
            raise UsageError(f"model.depth is an integer, not {value!r}")
    except UsageError as error:
        raise UsageError(error.what, where=where, fix=error.fix) from error
    if shape.keys() <= model.keys():
        raise UsageError(
            f"model.{given[0]} has no effect: {', '.join(shape)} are all given beside it",
            where=where,
            why="fields of model override those of the shape that it names",
            fix="leave it out, or the fields",
        )
    return shape


def refuse_contradictions(given: JsonObject, found: Derived, values: Values) -> None:
    """Refuse fields of `model` that are not those of the weights.

    Args:
        given: what the user wrote, presets filled in.
        found: of `derive_model`.

    Raises:
        UsageError: a field has another value; names it.
    """
    if "name" in given:
        raise UsageError(
            "a class of your own cannot begin with a model of transformers",
            where=values.where(("model", "name")),
            fix="leave it out",
        )
    known, derived = found
    merged = Values({"model": {**derived, **given}}, file=values.file)
    config = parse(DecoderConfig, merged, ("model",))
    same = as_dict(known.canonical(config))
    for name in given:
        if name not in known.free and name in derived and same[name] != derived[name]:
            raise UsageError(
                f"model.{name} is {derived[name]} in the weights of trainer.load_path, not "
                f"{given[name]}",
                where=values.where(("model", name)),
                fix="leave it out: it follows from their config.json",
            )


def _begun(save_folder: str) -> JsonObject | None:
    """Return the configuration in the newest checkpoint that has one, None without a checkpoint."""
    for name in candidates(save_folder):
        store = Store(save_folder).child(name)
        try:
            return Checkpoint(store, Manifest.read(store)).config()
        except OlmError:
            continue  # it is damaged: whoever loads it says so
    return None
