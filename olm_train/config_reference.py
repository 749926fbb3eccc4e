"""The tables of docs/reference/train-config.md, made of the dataclasses: name, type, default, text.

    RunConfig -> fields, their hints and `Attributes:` --tables--> between the page's markers

    python -m olm_train.config_reference [PAGE]        write the tables of the page anew

Everything outside of the markers is written by hand and stays as it is. Never: text of its own;
what a field means stands in the docstring of its dataclass.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from olm_data.command import reported
from olm_data.config.convert import as_dict
from olm_data.config.hints import FilePath, attributes
from olm_train.run import config_schema

PAGE = "docs/reference/train-config.md"
HEAD = "| field | type | default | meaning |\n|---|---|---|---|\n"
_BLOCK = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end of fields -->)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table."""

    type: str
    default: str
    meaning: str


def refresh(page: str) -> str:
    """Return the page with the tables between its markers made anew.

    Raises:
        KeyError: a marker names a section that the configuration does not have.
    """
    from olm_train.run.config import RunConfig

    sections = _sections(RunConfig)

    def table(match: re.Match[str]) -> str:
        return match[1] + HEAD + "".join(sections[match[2]]) + match[3]

    return _BLOCK.sub(table, page)


def _sections(config: type[Any]) -> dict[str, list[str]]:
    """Lines of the table of each field of `config` that is a section, and of the rest as "run"."""
    sections: dict[str, list[str]] = {"run": []}
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            sections[field.name] = list(_lines(hints[field.name], f"{field.name}."))
        else:
            row = _row(config, field, hints[field.name])
            sections["run"].append(_line(field.name, row))
    return sections


def _lines(config: Any, prefix: str) -> Iterator[str]:
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        hint, name = hints[field.name], prefix + field.name
        sections = [kind for kind in _kinds(hint) if dataclasses.is_dataclass(kind)]
        row = _row(config, field, hint)
        if len(sections) > 1:
            yield from _union(sections, f"{name}.", field, row.meaning)
            continue
        if not sections or field.default is None:
            yield _line(name, row)
        for section in sections:
            yield from _lines(section, f"{name}.")
        if (item := _item(hint)) is not None:
            yield from _lines(item, f"{name}[].")


def _union(
    kinds: list[Any], prefix: str, union: dataclasses.Field[Any], meaning: str
) -> Iterator[str]:
    """Lines of all fields of several kinds; one that not all have says which ones do."""
    names = [_own_name(kind) for kind in kinds]
    usual = "null" if union.default is None else f"`{as_dict(_value(union))['name']}`"
    yield _line(
        f"{prefix}name", Row(", ".join(f"`{name}`" for name in names), usual, f"which: {meaning}")
    )
    found: dict[str, dict[Row, list[str]]] = {}
    items: dict[str, Any] = {}
    for kind, own in zip(kinds, names, strict=True):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name != "name":
                row = _row(kind, field, hints[field.name])
                found.setdefault(field.name, {}).setdefault(row, []).append(own)
                items[field.name] = _item(hints[field.name])
    for name, rows in found.items():
        for row, owners in rows.items():
            whose = ", ".join(f"`{owner}`" for owner in owners)
            if len(owners) > len(kinds) / 2:
                whose = "not " + ", ".join(f"`{own}`" for own in names if own not in owners)
            note = "" if len(owners) == len(kinds) else f"{whose}: "
            yield _line(prefix + name, dataclasses.replace(row, meaning=note + row.meaning))
        if (item := items.get(name)) is not None:
            yield from _lines(item, f"{prefix}{name}[].")


def _item(hint: Any) -> Any:
    """Return the dataclass that a list holds, None if it holds none or several kinds."""
    item = get_args(hint)[0] if get_origin(hint) is list else None
    return item if dataclasses.is_dataclass(item) else None


def _row(config: Any, field: dataclasses.Field[Any], hint: Any) -> Row:
    return Row(_type(hint), _default(field), attributes(config).get(field.name, ""))


def _line(name: str, row: Row) -> str:
    meaning = row.meaning.replace("|", "\\|").removesuffix(".")
    return f"| `{name}` | {row.type} | {row.default} | {meaning} |\n"


def _kinds(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for kind in get_args(hint) if kind is not type(None)]
    return [hint]


def _type(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        null = ["null"] if type(None) in inner else []
        return " or ".join([_type(kind) for kind in inner if kind is not type(None)] + null)
    simple = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "any"}
    if hint in simple:
        return simple[hint]
    if hint is FilePath:
        return "path"
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    if origin in (dict, Mapping):
        return f"name: {_type(inner[1])}"
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"{len(inner)} of: {_type(inner[0])}"
    if origin in (list, tuple):
        items = _kinds(inner[0])
        some = any(dataclasses.is_dataclass(kind) for kind in items) and len(items) > 1
        return "list of: mapping, by its `name`" if some else f"list of: {_type(inner[0])}"
    if _own_name(hint):
        return f"`{_own_name(hint)}`"
    return "mapping of " + ", ".join(f"`{field.name}`" for field in dataclasses.fields(hint))


def _value(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> str:
    value = _value(field)
    if value is dataclasses.MISSING:
        return "-"
    plain = as_dict(value)
    if isinstance(plain, str):
        return f"`{plain.replace(str(Path.home()), '~')}`"
    if isinstance(plain, bool) or plain is None:
        return {True: "true", False: "false", None: "null"}[plain]
    return f"{plain:g}" if isinstance(plain, float) else str(plain)


def _own_name(kind: Any) -> str:
    """Return what a configuration calls a component of this kind, "" if it has one kind only."""
    names = [field.default for field in dataclasses.fields(kind) if field.name == "name"]
    return names[0] if names and type(names[0]) is str else ""


def main(arguments: list[str]) -> None:
    """Write the tables of the page and the JSON Schema anew."""
    with reported(debug=False):
        page = Path(arguments[0] if arguments else PAGE)
        page.write_text(refresh(page.read_text()))
        config_schema.PATH.write_text(config_schema.encoded())


if __name__ == "__main__":
    main(sys.argv[1:])
