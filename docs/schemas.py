"""Writes the JSON Schemas of configurations, made of their types, for editors and a first look.

    python docs/schemas.py

dataclass or Struct --schema_of--> train, recipe and mixture.schema.json, beside the types
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args, get_origin

from msgspec import Meta

from olm_data.config.convert import (
    as_dict,
    choices,
    fields_of,
    is_section,
    is_union,
    parts_of,
    plain,
    rest_of,
    tags_of,
)
from olm_data.config.docs import attributes, parts_by_name, summary_of
from olm_data.config.hints import FilePath, ReadBy, Schema
from olm_data.config.schema import ENTRY_POINTS
from olm_data.mixture import manifest
from olm_data.order.orders import manifest_orders
from olm_data.packing.packings import PACKINGS
from olm_data.tokenization.recipe import Recipe
from olm_train.run import command
from olm_train.run.config import RunConfig

SHAPES = {
    "preset": {"type": "string", "description": "a published shape, such as olmo2-1b"},
    "depth": {"type": "integer", "description": "blocks; the rest of the shape follows from it"},
}
"""Fields of `model` that stand for others (see `model.presets`)."""
_SIMPLE = {
    int: "integer",
    float: "number",
    Fraction: "number",
    str: "string",
    bool: "boolean",
    FilePath: "string",
    type(None): "null",
}
_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "pattern": "pattern",
}


def train() -> Schema:
    """Return the schema of a training configuration."""
    found = schema_of(RunConfig, "train.yaml of olm_train")
    # the weights at trainer.load_path may give it
    found["$defs"]["RunConfig"]["required"].remove("model")
    model = found["$defs"]["DecoderConfig"]
    model["properties"] |= SHAPES
    del model["required"]  # a shape or the lock may give them
    return found


def recipe() -> Schema:
    """Return the schema of a recipe of `olm-data tokenize`."""
    return schema_of(Recipe, "recipe.yaml of olm-data tokenize")


def mixture() -> Schema:
    """Return the schema of a manifest."""
    found = schema_of(manifest.ManifestKeys, "manifest of a mixture of olm_data", counts=False)
    definitions = found["$defs"]
    for choice in [*PACKINGS.values(), *manifest_orders().values()]:
        keys, _ = properties(choice, definitions, counts=False)  # required with their choice only
        definitions["ManifestKeys"]["properties"] |= keys
    return found


SCHEMAS: Mapping[Path, Callable[[], Schema]] = {
    command.SCHEMA: train,
    Path(command.SCHEMA).parents[2] / "olm_data/tokenization/recipe.schema.json": recipe,
    manifest.SCHEMA: mixture,
}


def encoded(schema: Schema) -> str:
    """Return the text of the file."""
    return json.dumps(schema, indent=1) + "\n"


def schema_of(config: Any, title: str, *, counts: bool = True) -> Schema:
    """Return the JSON Schema of a configuration; each section is a definition.

    Args:
        config: dataclass or Struct.
        title: what a file of it is.
        counts: an integer may be written `95B`.
    """
    definitions: Schema = {}
    root = _of(config, definitions, counts)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def properties(config: Any, definitions: Schema, counts: bool = True) -> tuple[Schema, list[str]]:
    """Return the schemas of the fields of a section, and the names of those without a default."""
    said, rest = attributes(config), rest_of(config)
    found: Schema = {}
    required = []
    for name, field in fields_of(config).items():
        if name == rest:
            found |= _named_parts(field.hint, definitions, counts)
            continue
        item = _of(field.hint, definitions, counts)
        if text := said.get(name):
            item = {**item, "description": text}
        default = field.default() if field.default is not None else None
        if name == "name" and item.get("enum") == [default]:
            item = {"const": default}  # which of several kinds it is
        elif field.default is None:
            required.append(name)
        elif field.shown:
            item = {**item, "default": _plain(default)}
        found[name] = item
    return found, required


def _named_parts(hint: Any, definitions: Schema, counts: bool) -> Schema:
    """Return the schemas of what this distribution brings under names of its own."""
    found: Schema = {}
    for name, kind in parts_by_name(hint).items():
        item = _of(kind | None, definitions, counts)
        found[name] = {**item, "description": summary_of(kind), "default": None}
    return found


def _of(hint: Any, definitions: Schema, counts: bool, *, text: bool = True) -> Schema:
    kind, notes = plain(hint)
    for note in notes:
        if isinstance(note, ReadBy):
            return dict(note.schema)
    found = _of_kind(hint, kind, definitions, counts)
    if (parts := parts_of(hint)) is not None:
        own = _part(parts.group)
        found = {"anyOf": [*found.get("anyOf", [found]), own]} if found else own
    if text and (names := tags_of(kind)):
        named = {"type": "string"} if parts else {"enum": names}
        found = {"anyOf": [*found.get("anyOf", [found]), named]}
    for note in notes:
        if isinstance(note, Meta):
            given = {name: getattr(note, name) for name in _LIMITS}
            found |= {_LIMITS[name]: limit for name, limit in given.items() if limit is not None}
            if note.min_length is not None:
                what = {"array": "Items", "object": "Properties"}.get(found["type"], "Length")
                found[f"min{what}"] = note.min_length
    return found


def _part(group: str) -> Schema:
    """Return the schema of a part of one's own; its fields are those of a class not known here."""
    name = {"type": "string", "description": "module:Class"}
    return {
        "type": "object",
        "properties": {"name": name},
        "required": ["name"],
        ENTRY_POINTS: group,
    }


def _other_names(kind: Any, definitions: Schema, counts: bool) -> Schema | bool:
    rest = rest_of(kind)
    if rest is None:
        return False
    return _of(get_args(plain(fields_of(kind)[rest].hint)[0])[1], definitions, counts)


def _of_kind(hint: Any, kind: Any, definitions: Schema, counts: bool) -> Schema:
    origin, inner = get_origin(kind), get_args(kind)
    if is_union(kind):
        return {"anyOf": [_of(one, definitions, counts, text=False) for one in inner]}
    if is_section(kind):
        name = kind.__name__
        if name not in definitions:
            definitions[name] = {}  # a cycle ends here
            fields, required = properties(kind, definitions, counts)
            definitions[name] = {
                "type": "object",
                "properties": fields,
                **({"required": required} if required else {}),
                "additionalProperties": _other_names(kind, definitions, counts),
            }
        return {"$ref": f"#/$defs/{name}"}
    if known := choices(hint):
        return {"enum": known}
    if origin in (dict, Mapping):
        names = _of(inner[0], definitions, counts)
        return {
            "type": "object",
            **({} if names == {"type": "string"} else {"propertyNames": names}),
            "additionalProperties": _of(inner[1], definitions, counts),
        }
    if origin in (list, tuple):
        return {"type": "array", "items": _of(inner[0], definitions, counts)}
    if kind is int and counts:
        return {"type": ["integer", "string"]}
    return {"type": _SIMPLE[kind]} if kind in _SIMPLE else {}


def _plain(value: Any) -> Any:
    """Return a default as JSON, without the folder of who made the schema."""
    plain_value = as_dict(value)
    if isinstance(plain_value, str):
        return plain_value.replace(str(Path.home()), "~")
    return float(plain_value) if isinstance(plain_value, Fraction) else plain_value


if __name__ == "__main__":
    for path, made in SCHEMAS.items():
        path.write_text(encoded(made()))
