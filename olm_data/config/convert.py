"""Values to typed configurations: `parse`, and back to plain values: `as_dict`.

    Values, dataclass or Struct --fields, unions, mappings, lists--> configuration | UsageError
    single values: msgspec.convert

Generic: knows dataclasses and their annotations, nothing of what they are for.
Never: fill in a value that the dataclass does not declare, or pass over one that it does not know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from olm_data.config.hints import (
    FilePath,
    OneOf,
    Reader,
    fields_of,
    hints_of,
    is_section,
    is_union,
    kinds_of,
    name_of,
    plain,
)
from olm_data.config.path import KeyPath, dotted
from olm_data.config.values import Values, short
from olm_data.errors import OlmError, UsageError, printable

T = TypeVar("T")


class Config:
    """Base of a frozen dataclass whose annotations are checked also where Python makes it.

    A `__post_init__` of the dataclass's own calls `super().__post_init__()` first.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        here, hints = Values({}, file=kind.__name__), hints_of(kind)
        for field in fields_of(kind):
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
        if isinstance(note, OneOf) and value not in list(note.names()):
            raise values.wrong_type(path, hint, value)
    found = _of_kind(kind, hint, value, values, path)
    for note in notes:
        if isinstance(note, Meta) and not _keeps(note, found):
            raise values.out_of_bounds(path, hint, note, value)
    return found


def _of_kind(kind: Any, hint: Any, value: Any, values: Values, path: KeyPath) -> Any:
    """Return `value` as a `kind`, which is `hint` without its constraints."""
    origin = get_origin(kind)
    if is_union(kind):
        return _one_of(kind, value, values, path)
    if is_section(kind):
        return _section(kind, hint, value, values, path)
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
        raise values.wrong_type(path, hint, value)
    if kind is Fraction and type(value) is int:
        value = Fraction(value)
    try:
        found = msgspec.convert(values.whole(value) if kind is int else value, kind)
    except msgspec.ValidationError:
        raise values.wrong_type(path, hint, value) from None
    if isinstance(found, float) and not math.isfinite(found):
        raise values.wrong_type(path, hint, value)
    return found


def _keeps(limits: Meta, value: Any) -> bool:
    """Whether a value is within what an annotation allows; fractions are compared exactly."""
    pairs = ((limits.ge, ge), (limits.gt, gt), (limits.le, le), (limits.lt, lt))
    return (
        all(limit is None or holds(value, limit) for limit, holds in pairs)
        and (limits.min_length is None or len(value) >= limits.min_length)
        and (limits.pattern is None or re.search(limits.pattern, value) is not None)
    )


def _one_of(union: Any, value: Any, values: Values, path: KeyPath) -> Any:
    if value is None and values.nulls and type(None) in get_args(union):
        return None
    kinds = kinds_of(union)
    if len(kinds) == 1:
        return _convert(kinds[0], value, values, path)
    named = {name_of(kind): kind for kind in kinds if is_section(kind)}
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


def _section(kind: Any, hint: Any, value: Any, values: Values, path: KeyPath) -> Any:
    """Return the dataclass or Struct `kind`, made of a mapping."""
    if isinstance(value, kind):
        return value
    given = values.section(path, hint, value)
    fields, hints = {field.name: field for field in fields_of(kind)}, hints_of(kind)
    for name in given:
        if name not in fields:
            raise values.unknown_field((*path, name), fields)
    parsed = {
        name: _convert(hints[name], item, values, (*path, name)) for name, item in given.items()
    }
    for name, field in fields.items():
        if name not in parsed and field.default is None:
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
        error.where = values.where(path)
        raise
