"""The JSON Schema of a configuration: for editors, and for a first look.

    JSON Schema (2020-12), `docs/schemas.py` makes it of the types --check_names--> misspelt names

`check_names` finds misspelt fields and kinds without importing what the configuration is for; all
else is left to `parse`, which knows more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from olm_data.config.convert import is_part_name, unknown_field, unknown_kind
from olm_data.config.hints import Schema
from olm_data.config.values import KeyPath, Values, dotted
from olm_data.plugins import path_of

ENTRY_POINTS = "x-entry-points"
"""Key of a schema: what it describes is a part of one's own, or of the packages of this group."""
_DEEPEST = 5
"""Sections in sections that a misplaced field is looked for in."""


def modeline(schema: Path, folder: str = ".") -> str:
    """Return the first line of a YAML file in `folder`, by which editors find its schema."""
    return f"# yaml-language-server: $schema={Path(os.path.relpath(schema, folder)).as_posix()}"


def check_names(schema: Schema, values: Values) -> None:
    """Refuse misspelt fields and kinds of components, as `parse` would, but at once.

    Raises:
        UsageError: names file and line or option, and the nearest name.
    """
    _check(schema, schema, values.data, values, ())


def _check(node: Schema, root: Schema, value: Any, values: Values, path: KeyPath) -> None:
    definitions = root["$defs"]
    while "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    if "anyOf" in node:
        kind = _named(node["anyOf"], definitions, value, values, path)
        if kind is not None:
            _check(kind, root, value, values, path)
    elif isinstance(value, dict):
        known, other = node.get("properties", {}), node.get("additionalProperties")
        for name, item in value.items():
            group = other.get(ENTRY_POINTS) if isinstance(other, dict) else None
            unknown = other is False or (group and not (isinstance(item, dict) and "name" in item))
            if name not in known and unknown and not (group and path_of(group, str(name))):
                elsewhere = () if path else _places(root, str(name))  # typed without its section
                raise unknown_field(values, (*path, name), known, elsewhere)
        for name, item in value.items():
            if inner := known.get(name) or other:
                _check(inner, root, item, values, (*path, name))
    elif isinstance(value, list) and "items" in node:
        for number, item in enumerate(value):
            _check(node["items"], root, item, values, (*path, number))


def _places(root: Schema, name: str) -> list[str]:
    """Return where fields of a name stand, the least deep ones first: `train_module.optim.lr`."""
    found: dict[str, None] = {}
    level: list[tuple[Schema, KeyPath]] = [(root, ())]
    for _ in range(_DEEPEST):
        below = list[tuple[Schema, KeyPath]]()
        for node, path in level:
            for section in _sections(node, root["$defs"]):
                inner = section.get("properties", {})
                if name in inner:
                    found[dotted((*path, name))] = None
                below += [(each, (*path, key)) for key, each in inner.items()]
        level = below
    return list(found)


def _sections(node: Schema, definitions: Schema) -> Iterator[Schema]:
    """Yield the sections that a node may be."""
    while "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    if "anyOf" in node:
        for each in node["anyOf"]:
            yield from _sections(each, definitions)
    elif "properties" in node:
        yield node


def _names(section: Schema) -> list[Any]:
    """Return the names that a section may have."""
    name = section["properties"].get("name", {})
    return [*name.get("enum", []), name.get("const")]


def _named(
    kinds: list[Schema], definitions: Schema, value: Any, values: Values, path: KeyPath
) -> Schema | None:
    """Return which of several kinds a value is of: by its `name`, or the only one it could be."""
    if isinstance(value, list):
        return next((kind for kind in kinds if "items" in kind), None)
    sections = [definitions[k["$ref"].rpartition("/")[2]] for k in kinds if "$ref" in k]
    if not isinstance(value, dict) or not sections:
        return None
    groups = [kind[ENTRY_POINTS] for kind in kinds if ENTRY_POINTS in kind]
    known = [name for node in sections for name in _names(node)]
    if groups and is_part_name(value.get("name"), groups[0], known):
        return None
    if len(sections) == 1:
        result: dict[str, Any] = sections[0]
        return result
    named = {node["properties"].get("name", {}).get("const"): node for node in sections}
    name = value.get("name", next(iter(named)))
    if isinstance(name, str) and name not in named:
        raise unknown_kind(values, path, name, named)
    return named.get(name) if isinstance(name, str) else None
