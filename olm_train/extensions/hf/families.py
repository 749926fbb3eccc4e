"""The families of transformers' models that our decoder can be, and which one a model is of.

    config.json   --family_of_hf-----> Family --config_from_hf--> DecoderConfig
    DecoderConfig --family_of_config-> Family --config_to_hf----> config.json
                                         `-tensors(config)-> each parameter of ours, and the tensors
                                           of theirs that it is made of (`tensors.py`)

What a family cannot express is refused with the fields that prevent it, in both directions. A
shape is expressible exactly when it comes back from its config.json, as `canonical` gives it.

This room knows configurations and names. It reads no file and lies below `checkpoint`, so that what
loads, trains and exports can all use it.
"""

from __future__ import annotations

from olm_data.errors import InputError, UsageError, printable, suggest
from olm_train.extensions.hf.family import Family, canonical
from olm_train.extensions.hf.fields import Json
from olm_train.extensions.hf.table import FAMILIES
from olm_train.model.config import DecoderConfig

__all__ = ["FAMILIES", "Family", "canonical", "family_of_config", "family_of_hf"]


def family_of_hf(fields: Json) -> Family:
    """Return the family that a config.json is of.

    Raises:
        InputError: it is of none of `FAMILIES`.
    """
    model_type, named = fields.get("model_type"), fields.get("architectures")
    by_type = {family.model_type: family for family in FAMILIES}
    found = by_type.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        said = printable(str(model_type)[:60])
        raise InputError(
            f"the model_type {said} is not one that this program knows",
            where="config.json",
            fix=suggest(said, by_type),
        )
    if named and named != [found.architecture]:
        raise InputError(
            f"the architecture {printable(str(named)[:80])} is not that of a language model of "
            f"{found.model_type}",
            where="config.json",
            fix=f"use the weights of a {found.architecture}",
        )
    return found


def family_of_config(config: DecoderConfig) -> Family:
    """Return the first family that a shape is a model of.

    Raises:
        UsageError: there is none; names what prevents each of the nearest ones.
    """
    found = {family.name: family.problems(config) for family in FAMILIES}
    for family in FAMILIES:
        if not found[family.name]:
            return family
    near = sorted(found, key=lambda name: len(found[name]))[:3]
    raise UsageError(
        "no model of transformers that this program knows has this shape:"
        + "".join(f"\n    {name}: " + "; ".join(map(str, found[name])) for name in near),
        where="model",
        fix="train it with the fields of one of these, or export it in our own format",
    )
