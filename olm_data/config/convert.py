"""Values to typed configurations: `parse`, and back to plain values: `as_dict`.

    Values, dataclass --fields, unions, mappings, lists: walked here--> configuration | UsageError
                                     single values: msgspec.convert

Generic: knows dataclasses and their annotations, nothing of what they are for.
Never: fill in a value that the dataclass does not declare, or pass over one that it does not know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from olm_data.config.hints import (
    FilePath,
    Reader,
    bounds,
    hints_of,
    is_union,
    kinds_of,
    name_of,
    plain,
)
from olm_data.config.path import KeyPath, dotted
from olm_data.config.values import Values, short
from olm_data.counts import parse_count
from olm_data.errors import OlmError, UsageError, printable

T = TypeVar("T")


class Config:
    """Base of a frozen dataclass whose annotations are checked also where Python makes it.

    A `__post_init__` of the dataclass's own calls `super().__post_init__()` first.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        here, hints = Values({}, file=kind.__name__), hints_of(kind)
        for field in dataclasses.fields(kind):
            if field.init:
                _convert(hints[field.name], getattr(self, field.name), here, (field.name,))


def parse(config: type[T], values: Values, path: KeyPath = ()) -> T:
    """Return the dataclass `config` made of the values at `path`.

    Raises:
        UsageError: unknown or missing field, wrong type, or a value the dataclass refuses.
    """
    found: Any = values.data
    for part in path:
        found = found[part]
    parsed: T = _convert(config, found, values, path)
    return parsed


def as_dict(config: Any) -> Any:
    """Return a config as JSON values: dataclasses to dicts, tuples to lists, enums to values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: as_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Enum):
        return config.value
    if isinstance(config, Mapping):
        return {str(key): as_dict(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [as_dict(value) for value in config]
    return config


def differences(old: Any, new: Any, path: KeyPath = ()) -> list[str]:
    """Return one line for each place where two plain values differ, `a.b: 1 -> 2`."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in [*old, *(key for key in new if key not in old)]:
            lines += differences(old.get(key), new.get(key), (*path, key))
        return lines
    return [] if old == new else [f"{dotted(path)}: {short(old)} -> {short(new)}"]


def _convert(hint: Any, value: Any, values: Values, path: KeyPath) -> Any:
    kind, notes = plain(hint)
    for note in notes:
        if isinstance(note, Reader):
            return _read(note, value, values, path)
    found = _of_kind(kind, value, values, path)
    for note in notes:
        if isinstance(note, Meta):
            try:
                msgspec.convert(found, Annotated[type(found), note])
            except msgspec.ValidationError:
                raise values.out_of_bounds(path, bounds(note), value) from None
    return found


def _of_kind(kind: Any, value: Any, values: Values, path: KeyPath) -> Any:
    """Return `value` as a `kind`, which no constraint is attached to."""
    origin = get_origin(kind)
    if is_union(kind):
        return _one_of(kind, value, values, path)
    if dataclasses.is_dataclass(kind):
        return _of_dataclass(kind, value, values, path)
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        return _sequence(origin, get_args(kind), value, values, path)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        name, inner = get_args(kind)
        return {
            _convert(name, key, values, (*path, key)): _convert(inner, item, values, (*path, key))
            for key, item in value.items()
        }
    if kind is FilePath and isinstance(value, str):
        return values.file_path(path, value)
    if origin in (list, tuple, dict, Mapping):
        raise values.wrong_type(path, kind, value)
    try:
        found = msgspec.convert(_whole(value) if kind is int else value, kind)
    except msgspec.ValidationError:
        raise values.wrong_type(path, kind, value) from None
    if isinstance(found, float) and not math.isfinite(found):
        raise values.wrong_type(path, kind, value)
    return found


def _one_of(union: Any, value: Any, values: Values, path: KeyPath) -> Any:
    if value is None and type(None) in get_args(union):
        return None
    kinds = kinds_of(union)
    if len(kinds) == 1:
        return _convert(kinds[0], value, values, path)
    named = {name_of(kind): kind for kind in kinds if dataclasses.is_dataclass(kind)}
    if isinstance(value, dict) and named:
        name = value.get("name", next(iter(named)))
        if not isinstance(name, str):
            raise values.wrong_type((*path, "name"), Literal[tuple(named)], name)
        if name not in named:
            raise values.unknown_kind(path, name, named)
        return _convert(named[name], value, values, path)
    for kind in kinds:
        with contextlib.suppress(UsageError):
            return _convert(kind, value, values, path)
    raise values.wrong_type(path, Union[kinds], value)  # noqa: UP007  # built at run time


def _sequence(
    origin: Any, kinds: tuple[Any, ...], items: Any, values: Values, path: KeyPath
) -> Any:
    if origin is tuple and kinds[-1] is not Ellipsis:
        if len(items) != len(kinds):
            raise UsageError(
                f"{printable(dotted(path))} has {len(kinds)} values, not {len(items)}",
                where=values.where(path),
            )
    else:
        kinds = (kinds[0],) * len(items)
    pairs = enumerate(zip(kinds, items, strict=True))
    return origin(_convert(kind, item, values, (*path, n)) for n, (kind, item) in pairs)


def _of_dataclass(kind: Any, value: Any, values: Values, path: KeyPath) -> Any:
    if isinstance(value, kind):
        return value
    if value is None:
        value = {}  # `speed_monitor:` with nothing after it
    if not isinstance(value, dict):
        raise values.wrong_type(path, kind, value)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name in value:
        if name not in fields:
            raise values.unknown_field((*path, name), fields)
    hints = hints_of(kind)
    parsed = {
        name: _convert(hints[name], item, values, (*path, name)) for name, item in value.items()
    }
    for name, field in fields.items():
        if name not in parsed and field.default is field.default_factory is dataclasses.MISSING:
            raise values.missing((*path, name), hints[name])
    try:
        return kind(**parsed)
    except OlmError as error:
        inner = tuple((error.where or "").split("."))
        deeper = inner if inner[: len(path)] == path else (*path, *inner)
        raise UsageError(
            error.what, where=values.where(deeper), why=error.why, fix=error.fix
        ) from error


def _read(reader: Reader, value: Any, values: Values, path: KeyPath) -> Any:
    try:
        return reader.read(value)
    except UsageError as error:
        place = values.where(path)
        raise UsageError(error.what, where=place, why=error.why, fix=error.fix) from error


def _whole(value: Any) -> Any:
    """Return the integer that `1e6` or `95B` spells, anything else as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        with contextlib.suppress(UsageError):
            return parse_count(value)
    return value
