"""Writes the tables of reference pages, made of a configuration: name, type, default, meaning.

    python docs/fields.py

dataclass: fields, hints, `Attributes:` --refresh--> between `<!-- fields of NAME -->` markers

Everything outside of the markers is written by hand and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin

from msgspec import Meta

from olm_data.config.convert import (
    SIMPLE,
    Field,
    as_dict,
    choices,
    describe,
    fields_of,
    is_section,
    is_union,
    kinds_of,
    name_of,
    plain,
    rest_of,
)
from olm_data.config.docs import attributes, parts_by_name, summary_of
from olm_data.config.hints import ReadBy, bounds
from olm_data.tokenization.recipe import Recipe
from olm_train.run.config import RunConfig

_FOLDER = Path(__file__).with_name("reference")
PAGES = {_FOLDER / "train-config.md": RunConfig, _FOLDER / "recipe.md": Recipe}
HEAD = "| field | type | default | meaning |\n|---|---|---|---|\n"
REST = "run"
"""Name of the table of the fields that are no sections."""

_BLOCK = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end of fields -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    type: str
    default: str
    meaning: str


def refresh(page: str, config: Any) -> str:
    """Return the page with the tables between its markers made anew.

    Raises:
        KeyError: a marker names a section that the configuration does not have.
    """
    tables: dict[str, list[str]] = {REST: []}
    for name, field in fields_of(config).items():
        if is_section(kind := plain(field.hint)[0]):
            tables[name] = list(_lines(kind, f"{name}."))
        else:
            tables[REST].append(_line(name, _row(config, name)))

    def table(match: re.Match[str]) -> str:
        return match[1] + HEAD + "".join(tables[match[2]]) + match[3]

    return _BLOCK.sub(table, page)


def _lines(config: Any, prefix: str) -> Iterator[str]:
    for key, field in fields_of(config).items():
        hint, name = field.hint, prefix + key
        if key == rest_of(config):
            for own, kind in parts_by_name(hint).items():
                yield _line(f"{prefix}{own}", Row(_type(kind | None), "null", summary_of(kind)))
                yield from _lines(kind, f"{prefix}{own}.")
            meaning = attributes(config).get(key, "")
            yield _line(f"{prefix}NAME", Row("mapping with `name: module:Class`", "-", meaning))
            continue
        sections, row = _sections(hint), _row(config, key)
        if len(sections) > 1:
            yield from _variants(sections, f"{name}.", field, row.meaning)
            continue
        if not sections or (field.default is not None and field.default() is None):
            yield _line(name, row)
        for section in sections:
            yield from _lines(section, f"{name}.")
        if (item := _item(hint)) is not None:
            yield from _lines(item, f"{name}[].")


def _variants(kinds: list[Any], prefix: str, field: Field, meaning: str) -> Iterator[str]:
    """Lines of all fields of several kinds; one that not all have says which ones do."""
    names = [name_of(kind) for kind in kinds]
    default = field.default() if field.default is not None else None
    usual = "null" if default is None else f"`{as_dict(default)['name']}`"
    which = ", ".join(f"`{name}`" for name in names)
    yield _line(f"{prefix}name", Row(which, usual, f"which: {meaning}"))
    found: dict[str, dict[Row, list[str]]] = {}
    fields: dict[str, Field] = {}
    for kind, own in zip(kinds, names, strict=True):
        for name in [each for each in fields_of(kind) if each != "name"]:
            found.setdefault(name, {}).setdefault(_row(kind, name), []).append(own)
        fields |= fields_of(kind)
    for name, rows in found.items():
        for row, owners in rows.items():
            whose = ", ".join(f"`{owner}`" for owner in owners)
            if len(owners) > len(kinds) / 2:
                whose = "not " + ", ".join(f"`{own}`" for own in names if own not in owners)
            note = "" if len(owners) == len(kinds) else f"{whose}: "
            row = replace(row, meaning=note + row.meaning)
            if len(inner := _sections(fields[name].hint)) > 1:
                yield from _variants(inner, f"{prefix}{name}.", fields[name], row.meaning)
            else:
                yield _line(prefix + name, row)
        if (item := _item(fields[name].hint)) is not None:
            yield from _lines(item, f"{prefix}{name}[].")


def _sections(hint: Any) -> list[Any]:
    """Return the kinds of sections that a field may hold."""
    return [kind for kind in kinds_of(plain(hint)[0]) if is_section(kind)]


def _item(hint: Any) -> Any:
    """Return the section that a list holds, None if it holds none or several kinds."""
    kind, _ = plain(hint)
    item = get_args(kind)[0] if get_origin(kind) is list else None
    return item if is_section(item) else None


def _row(config: Any, name: str) -> Row:
    field = fields_of(config)[name]
    return Row(_type(field.hint), _default(field), attributes(config).get(name, ""))


def _line(name: str, row: Row) -> str:
    meaning = row.meaning.replace("|", "\\|").removesuffix(".")
    return f"| `{name}` | {row.type} | {row.default} | {meaning} |\n"


def _type(hint: Any) -> str:
    kind, notes = plain(hint)
    for note in notes:
        if isinstance(note, ReadBy):
            return note.says.removeprefix("a ")
    if limits := [words for note in notes if isinstance(note, Meta) and (words := bounds(note))]:
        return ", ".join([_type(kind), *limits])
    origin, inner = get_origin(kind), get_args(kind)
    if is_union(kind):
        null = ["null"] if type(None) in inner else []
        return " or ".join([_type(one) for one in kinds_of(kind)] + null)
    if kind is Any or kind in SIMPLE:
        return "any" if kind is Any else re.sub("^an? ", "", describe(kind))
    if known := choices(hint):
        return ", ".join(f"`{choice}`" for choice in known)
    if origin in (dict, Mapping):
        return f"name: {_type(inner[1])}"
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"{len(inner)} of: {_type(inner[0])}"
    if origin in (list, tuple):
        several = len(kinds_of(inner[0])) > 1 and any(map(is_section, kinds_of(inner[0])))
        return "list of: mapping, by its `name`" if several else f"list of: {_type(inner[0])}"
    if isinstance(name_of(kind), str):
        return f"`{name_of(kind)}`"
    return "mapping of " + ", ".join(f"`{name}`" for name in fields_of(kind))


def _default(field: Field) -> str:
    if field.default is None:
        return "-"
    value = as_dict(field.default())
    if isinstance(value, str):
        return f"`{value.replace(str(Path.home()), '~')}`"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    for page, config in PAGES.items():
        page.write_text(refresh(page.read_text(), config))
