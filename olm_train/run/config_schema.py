"""The JSON Schema of train.yaml, made of the dataclasses: for editors, and for a first look.

    RunConfig -> fields, hints, docstrings --schema--> train.schema.json --check_names--> mistakes

    python -m olm_train.config_reference      writes it anew, with the tables of the reference page

`check_names` finds misspelt fields and kinds without importing what the configuration is for; all
else is left to `config.parse`, which knows more. Never: imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from olm_data.config.convert import as_dict
from olm_data.config.hints import FilePath, attributes
from olm_data.config.path import KeyPath
from olm_data.config.values import Values

PATH = Path(__file__).with_name("train.schema.json")
SHAPES = {
    "preset": {"type": "string", "description": "a published shape, such as olmo2-1b"},
    "depth": {"type": "integer", "description": "blocks; the rest of the shape follows from it"},
}
"""Fields of `model` that stand for others (see `model.presets`)."""
_SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean", FilePath: "string"}


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a training configuration."""
    from olm_train.run.config import RunConfig

    definitions: dict[str, Any] = {}
    root = _of(RunConfig, definitions)
    definitions["DecoderConfig"]["properties"] |= SHAPES
    for name in ("vocab_size", "d_model", "n_layers", "n_heads"):  # a shape or the lock gives them
        required = definitions["DecoderConfig"].get("required", [])
        if name in required:
            required.remove(name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "train.yaml of olm_train",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def encoded() -> str:
    """Return the text of `train.schema.json`."""
    return json.dumps(schema(), indent=1).replace(str(Path.home()), "~") + "\n"


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; dataclasses become definitions."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(kind, definitions) for kind in inner]}
    if hint is type(None):
        return {"type": "null"}
    if dataclasses.is_dataclass(hint):
        return _of_dataclass(hint, definitions)
    if origin is Literal:
        return {"enum": list(inner)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _of(inner[1], definitions)}
    if origin in (list, tuple):
        return {"type": "array", "items": _of(inner[0], definitions)}
    if hint is int:  # 95B is one, too
        return {"type": ["integer", "string"]}
    return {"type": _SIMPLE[hint]} if hint in _SIMPLE else {}


def _of_dataclass(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in definitions:
        definitions[name] = {}  # a cycle ends here
        hints, said = get_type_hints(kind), attributes(kind)
        properties, required = {}, []
        for field in dataclasses.fields(kind):
            if not field.init:
                continue
            item = _of(hints[field.name], definitions)
            if said.get(field.name):
                item = {**item, "description": said[field.name]}
            if field.name == "name" and isinstance(field.default, str):
                item = {"const": field.default}
            elif field.default is not dataclasses.MISSING:
                item = {**item, "default": as_dict(field.default)}
            elif field.default_factory is dataclasses.MISSING:
                required.append(field.name)
            properties[field.name] = item
        definitions[name] = {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}


@cache
def _written() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(PATH.read_bytes())
    return known


def check_names(values: Values) -> None:
    """Refuse misspelt fields and kinds of components, as `config.parse` would, but at once.

    Raises:
        UsageError: names file and line or option, and the nearest name.
    """
    _check(_written(), values.data, values, ())


def _check(node: dict[str, Any], value: Any, values: Values, path: KeyPath) -> None:
    while "$ref" in node:
        node = _written()["$defs"][node["$ref"].rpartition("/")[2]]
    if "anyOf" in node:
        _check_union(node["anyOf"], value, values, path)
    elif isinstance(value, dict) and "properties" in node:
        known = node["properties"]
        for name in value:
            if name not in known:
                raise values.unknown_field((*path, name), known)
        for name, item in value.items():
            _check(known[name], item, values, (*path, name))
    elif isinstance(value, dict) and isinstance(node.get("additionalProperties"), dict):
        for name, item in value.items():
            _check(node["additionalProperties"], item, values, (*path, name))
    elif isinstance(value, list) and "items" in node:
        for number, item in enumerate(value):
            _check(node["items"], item, values, (*path, number))


def _check_union(kinds: list[dict[str, Any]], value: Any, values: Values, path: KeyPath) -> None:
    """Check a mapping against the kind that it names, or the only one there is."""
    definitions = [_written()["$defs"][k["$ref"].rpartition("/")[2]] for k in kinds if "$ref" in k]
    if isinstance(value, dict) and definitions:
        named = {node["properties"].get("name", {}).get("const"): node for node in definitions}
        name = value.get("name", next(iter(named))) if len(definitions) > 1 else next(iter(named))
        if isinstance(name, str) and name not in named:
            raise values.unknown_kind(path, name, named)
        if name in named:
            _check(named[name], value, values, path)
    elif isinstance(value, list):
        for kind in kinds:
            if "items" in kind:
                _check(kind, value, values, path)
