"""The JSON Schema of a configuration, made of its types: for editors, and for a first look.

    dataclass or Struct --schema_of--> JSON Schema (2020-12) --check_names--> misspelt names

`check_names` finds misspelt fields and kinds without importing what the configuration is for; all
else is left to `parse`, which knows more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args, get_origin

from msgspec import Meta

from olm_data.config.convert import (
    as_dict,
    choices,
    fields_of,
    is_part_name,
    is_section,
    is_union,
    parts_of,
    plain,
    rest_of,
    tags_of,
    unknown_field,
    unknown_kind,
)
from olm_data.config.docs import attributes, parts_by_name, summary_of
from olm_data.config.hints import FilePath, Reader, Schema
from olm_data.config.values import KeyPath, Values, dotted
from olm_data.plugins import path_of

_ENTRY_POINTS = "x-entry-points"
"""Key of a schema: what it describes is a part of one's own, or of the packages of this group."""
_DEEPEST = 5
"""Sections in sections that a misplaced field is looked for in."""

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


def modeline(schema: Path, folder: str = ".") -> str:
    """Return the first line of a YAML file in `folder`, by which editors find its schema."""
    return f"# yaml-language-server: $schema={Path(os.path.relpath(schema, folder)).as_posix()}"


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
        if isinstance(note, Reader):
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
        _ENTRY_POINTS: group,
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
            group = other.get(_ENTRY_POINTS) if isinstance(other, dict) else None
            unknown = other is False or (group and not _has_name(item))
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


def _has_name(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value


def _named(
    kinds: list[Schema], definitions: Schema, value: Any, values: Values, path: KeyPath
) -> Schema | None:
    """Return which of several kinds a value is of: by its `name`, or the only one it could be."""
    if isinstance(value, list):
        return next((kind for kind in kinds if "items" in kind), None)
    sections = [definitions[k["$ref"].rpartition("/")[2]] for k in kinds if "$ref" in k]
    if not isinstance(value, dict) or not sections:
        return None
    groups = [kind[_ENTRY_POINTS] for kind in kinds if _ENTRY_POINTS in kind]
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
