"""Configurations back to plain values, `as_dict`, and where two of these differ, `differences`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from enum import Enum
from typing import Any, get_args, get_origin

from olm_data.config.convert import hints_of, is_section, kinds_of, parts_of, plain, rest_of, short
from olm_data.config.hints import Annotations, Parts
from olm_data.config.import_path import import_path
from olm_data.config.values import KeyPath, dotted
from olm_data.plugins import ours
from olm_data.redaction import MASK, hold, is_credential


def as_dict(config: Any) -> Any:
    """Return a config as JSON values: dataclasses to dicts, tuples to lists, enums to values.

    A field with `repr=False`, and a text in a field or key that is named like one (`api_key`,
    `token`, `password`), is a credential: it is `***` instead.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return _fields_as_dict(config)
    if isinstance(config, Enum):
        return config.value
    if isinstance(config, Mapping):
        return {
            str(key): _hidden(value) if is_credential(str(key), value) else as_dict(value)
            for key, value in config.items()
        }
    if isinstance(config, (list, tuple)):
        return [as_dict(value) for value in config]
    return config


def _hidden(secret: object) -> str:
    """Return what stands for a credential; from here on no text of this process shows it."""
    hold(str(secret))
    return MASK


def _fields_as_dict(config: Any) -> Any:
    kind: Any = type(config)
    hints, rest = _hints_with_parts(kind)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if (not field.repr and value is not None) or is_credential(field.name, value):
            value = _hidden(value)
        value = _part_as_dict(hints.get(field.name), value)
        found |= value if field.name == rest else {field.name: value}
    return found


@functools.cache
def _hints_with_parts(kind: Any) -> tuple[Annotations, str | None]:
    """Return the annotations where parts of one's own may stand, and the field of the rest."""
    try:
        hints, rest = hints_of(kind), rest_of(kind)
    except NameError:  # they cannot be resolved: of no class that `parse` makes
        return {}, None
    return {n: h for n, h in hints.items() if parts_of(h) is not None or n == rest}, rest


def _part_as_dict(hint: Any, value: Any) -> Any:
    """Return a value as JSON; a part that is none of the kinds of its field by its import path."""
    kind = plain(hint)[0]
    if get_origin(kind) is dict:
        inner = get_args(kind)[1]
        return {
            str(key): as_dict(item)
            if _is_named(parts_of(inner), str(key), type(item))
            else _part_as_dict(inner, item)
            for key, item in value.items()
        }
    found, parts = as_dict(value), parts_of(hint)
    if parts is not None and is_section(type(value)) and type(value) not in kinds_of(kind):
        if isinstance(value, parts.wrapper or ()):
            return as_dict(value.plain())
        found = {"name": import_path(type(value))} | {
            key: item for key, item in found.items() if key != "name"
        }
    return found


def _is_named(parts: Parts | None, name: str, kind: type) -> bool:
    """Whether this distribution brings a class under this name."""
    return parts is not None and ours(parts.group).get(name) == import_path(kind)


def differences(old: Any, new: Any, path: KeyPath = ()) -> list[str]:
    """Return one line for each place where two plain values differ, `a.b: 1 -> 2`."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in [*old, *(key for key in new if key not in old)]:
            lines += differences(old.get(key), new.get(key), (*path, key))
        return lines
    return [] if old == new else [f"{dotted(path)}: {short(old)} -> {short(new)}"]
