"""Values to typed configurations: `parse`, and back to plain values: `as_dict`.

    Values, dataclass or Struct --fields, unions, mappings, lists--> configuration | UsageError
    single values: msgspec.convert

Generic: knows dataclasses and their annotations, nothing of what they are for. What is wrong with
a value is found and worded here; `Values` knows the place.
Never: fill in a value that the dataclass does not declare, or pass over one that it does not know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from olm_data.config.hints import (
    Annotations,
    FilePath,
    OneOf,
    Parts,
    Reader,
    bounds,
    choices,
    describe,
    example_of,
    fields_of,
    hints_of,
    is_section,
    is_union,
    kinds_of,
    mapping_of,
    name_of,
    parts_of,
    plain,
    reason_of,
    rest_of,
)
from olm_data.config.import_path import import_path, is_import_path, load_class
from olm_data.config.path import KeyPath, dotted
from olm_data.config.values import Values
from olm_data.decoding import convert
from olm_data.errors import OlmError, UsageError, nearest_of, printable, quoted, suggest
from olm_data.plugins import names, ours, path_of
from olm_data.redaction import MASK, hold, is_credential

T = TypeVar("T")

_MOST_PLACES = 3


class Config:
    """Base of a dataclass whose fields are read alike wherever it is made, in Python and in a file.

    Text becomes the member that it names, a mapping the section that it stands for; what the
    annotation does not allow is refused. A `__post_init__` of the dataclass's own calls
    `super().__post_init__()` first.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        here, hints = Values({}, file=kind.__name__), hints_of(kind)
        for field in fields_of(kind):
            found = _convert(hints[field.name], getattr(self, field.name), here, (field.name,))
            object.__setattr__(self, field.name, found)


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


def _convert(hint: Any, value: Any, values: Values, path: KeyPath) -> Any:
    kind, notes = plain(hint)
    numpy = sys.modules.get("numpy")  # a number of it cannot be given before it is loaded
    value = value.item() if numpy is not None and isinstance(value, numpy.generic) else value
    for note in notes:
        if isinstance(note, Reader):
            return _read(note, value, values, path)
        if isinstance(note, Parts) and _is_part(note, kind, value):
            return _part(note, hint, value, values, path)
        if isinstance(note, OneOf) and value not in list(note.names()):
            raise _wrong_type(values, path, hint, value)
    found = _of_kind(kind, hint, value, values, path)
    for note in notes:
        if isinstance(note, Meta) and not _keeps(note, found):
            raise _out_of_bounds(values, path, hint, note, value)
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
        raise _wrong_type(values, path, hint, value)
    if kind is Fraction and type(value) is int:
        value = Fraction(value)
    try:
        found = convert(values.whole(value) if kind is int else value, kind)
    except msgspec.ValidationError:
        raise _wrong_type(values, path, hint, value) from None
    if isinstance(found, float) and not math.isfinite(found):
        raise _wrong_type(values, path, hint, value)
    return found


def _is_part(parts: Parts, kind: Any, value: Any) -> bool:
    """Whether a value is, or names, a part of one's own."""
    if not isinstance(value, dict):
        return isinstance(value, parts.base) and is_section(type(value))
    name = value.get("name")
    sections = filter(is_section, kinds_of(kind))
    known = [each for one in sections for each in choices(hints_of(one).get("name"))]
    if not known and kind is parts.base and not is_section(kind):
        return True  # there are no kinds but those of one's own
    return is_part_name(name, parts.group, known)


def is_part_name(name: object, group: str, known: Iterable[Any] = ()) -> bool:
    """Whether a name is an import path, or an entry point of a group, and none that is known."""
    if not isinstance(name, str) or name in list(known):
        return False
    return is_import_path(name) or path_of(group, name) is not None


def _part(parts: Parts, hint: Any, value: Any, values: Values, path: KeyPath) -> Any:
    """Return the part that a mapping names, its class imported; or the part that it is."""
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    if not isinstance(name, str):
        raise _missing(values, (*path, "name"), str)
    where = values.where((*path, "name"))
    found = name if is_import_path(name) else path_of(parts.group, name)
    if found is None:
        raise unknown_kind(values, path, name, names(parts.group))
    given = {key: item for key, item in value.items() if key != "name"}
    kind = _class_of(parts, found, values, path, where)
    if not issubclass(kind, parts.base):
        return _placed(lambda: parts.wrapper.of(found, kind, given), {}, values, path)
    if not dataclasses.is_dataclass(kind) or inspect.isabstract(kind):
        raise UsageError(
            f"{printable(found)} is not a dataclass that can be made",
            where=where,
            fix=f"decorate it with @dataclass({_frozen(parts.base)}kw_only=True), and write all "
            f"methods that {parts.base.__name__} leaves open",
        )
    return _section(kind, hint, given, values, path)


def _class_of(parts: Parts, found: str, values: Values, path: KeyPath, where: str) -> Any:
    """Import the class of a part; of somebody's own only where the user wrote its name."""
    if not values.imports and found not in ours(parts.group).values():
        raise UsageError(
            f"{printable(dotted(path))} is a class of somebody's own: {short(found)}",
            where=where,
            why="the configuration came with something else, and an import runs code",
            fix="name the class in a configuration of your own",
        )
    wrapped = () if parts.wrapper is None else (parts.wrapper.wraps,)
    return load_class(found, parts.base, *wrapped, where=where)


def _frozen(base: type) -> str:
    """Return the option that a dataclass derived from `base` needs, as its base has it."""
    own = getattr(base, "__dataclass_params__", None)
    return "frozen=True, " if own is not None and own.frozen else ""


def _keeps(limits: Meta, value: Any) -> bool:
    """Whether a value is within what an annotation allows; fractions are compared exactly."""
    pairs = ((limits.ge, ge), (limits.gt, gt), (limits.le, le), (limits.lt, lt))
    return (
        all(limit is None or holds(value, limit) for limit, holds in pairs)
        and (limits.min_length is None or len(value) >= limits.min_length)
        and (limits.pattern is None or re.search(limits.pattern, value) is not None)
    )


def _one_of(union: Any, value: Any, values: Values, path: KeyPath) -> Any:
    if value is None and not values.digits_only and type(None) in get_args(union):
        return None
    kinds = kinds_of(union)
    if len(kinds) == 1:
        return _convert(kinds[0], value, values, path)
    named = {name_of(kind): kind for kind in kinds if is_section(kind)}
    if isinstance(value, dict) and named:
        name = value.get("name", next(iter(named)))
        if not isinstance(name, str):
            raise _wrong_type(values, (*path, "name"), Literal[tuple(named)], name)
        if name not in named:
            raise unknown_kind(values, path, name, named)
        return _convert(named[name], value, values, path)
    for kind in kinds:
        with contextlib.suppress(UsageError):
            return _convert(kind, value, values, path)
    raise _wrong_type(values, path, Union[kinds], value)  # noqa: UP007  # built at run time


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
    given = {} if value is None else value  # `speed_monitor:` with nothing after it is an empty one
    if not isinstance(given, dict):
        raise _wrong_type(values, path, hint, value)
    fields, hints = {field.name: field for field in fields_of(kind)}, hints_of(kind)
    rest = rest_of(kind)
    known = [name for name in fields if name != rest]
    parsed = {
        name: _convert(hints[name], item, values, (*path, name))
        for name, item in given.items()
        if name in known
    }
    others = {name: item for name, item in given.items() if name not in known}
    if rest is not None:
        parsed[rest] = _others(hints[rest], others, known, values, path)
    elif others:
        raise unknown_field(values, (*path, next(iter(others))), known)
    for name, field in fields.items():
        if name not in parsed and field.default is None:
            raise _missing(values, (*path, name), hints[name])
    return _placed(lambda: kind(**parsed), fields, values, path)


def _others(
    hint: Any, given: Mapping[Any, Any], known: list[str], values: Values, path: KeyPath
) -> dict[str, Any]:
    """Return what stands under names that a section does not know: of packages, or of one's own."""
    inner = get_args(plain(hint)[0])[1]
    parts, found = parts_of(inner), {}
    for name, item in given.items():
        place, here = None if parts is None else path_of(parts.group, str(name)), (*path, name)
        if parts is not None and place is not None and not isinstance(item, parts.base):
            if item is not None:
                kind = _class_of(parts, place, values, here, values.where(here))
                if isinstance(item, dict) and "name" not in hints_of(kind):  # its name, once more
                    item = {key: value for key, value in item.items() if key != "name"}
                found[name] = _section(kind, inner, item, values, here)
        elif isinstance(item, dict) and "name" not in item:
            raise unknown_field(values, here, [*known, *(names(parts.group) if parts else ())])
        else:
            found[name] = _convert(inner, item, values, here)
    return found


def _placed(make: Callable[[], Any], fields: Container[str], values: Values, path: KeyPath) -> Any:
    """Return what is made, its errors with the place in the file."""
    try:
        return make()
    except OlmError as error:
        inner = (error.where or "").split(".")
        deeper = (*path, *inner) if inner[0] in fields else path
        raise UsageError(
            f"{printable(dotted(deeper))}: {error.what}" if deeper else error.what,
            where=values.where(deeper),
            why=error.why,
            fix=error.fix,
        ) from error


def _read(reader: Reader, value: Any, values: Values, path: KeyPath) -> Any:
    try:
        return reader.read(value)
    except UsageError as error:
        error.where = values.where(path)
        raise


def unknown_field(
    values: Values, path: KeyPath, known: Iterable[str], elsewhere: Sequence[str] = ()
) -> UsageError:
    """Return the error that there is no field at `path`, whose siblings are `known`.

    Args:
        elsewhere: where fields of this very name stand.
    """
    siblings = list(known)
    fix, near = suggest(str(path[-1]), siblings), nearest_of(str(path[-1]), siblings)
    if elsewhere:
        meant = [*([repr(near)] if near else []), *elsewhere]
        fix = f"did you mean {' or '.join(meant[:_MOST_PLACES])}?"
    return UsageError(f"unknown field {printable(dotted(path))}", where=values.where(path), fix=fix)


def unknown_kind(values: Values, path: KeyPath, name: str, known: Iterable[Any]) -> UsageError:
    """Return the error that there is no component `name` to stand at `path`."""
    return UsageError(
        f"{printable(dotted(path))} has no kind called {short(name)}",
        where=values.where((*path, "name")),
        fix=suggest(name, [str(choice) for choice in known]),
    )


def _missing(values: Values, path: KeyPath, hint: Any) -> UsageError:
    if example := example_of(hint):
        fix = _written(path, example)
    else:
        fix = f"add `{path[-1]}: ...` ({describe(hint)})"
    if not values.digits_only:
        fix += f", or --{dotted(path)}=... on the command line"
    return UsageError(
        f"{printable(dotted(path))} is missing",
        where=values.where(path[:-1]),
        why=reason_of(hint),
        fix=fix,
    )


def _wrong_type(values: Values, path: KeyPath, hint: Any, value: Any) -> UsageError:
    fix = None
    if known := [str(choice) for choice in choices(hint)]:
        fix = suggest(str(value), known)
    elif example := example_of(hint):
        fix = _written(path, example)
    elif meant := mapping_of(hint, value):
        given = values.is_option(path)
        fix = f"write --{dotted(path)}='{meant}'" if given else _written(path, meant)
    return UsageError(
        f"{_named(path)} is {describe(hint)}, not {short(value)}",
        where=values.where(path),
        fix=fix,
    )


def _out_of_bounds(
    values: Values, path: KeyPath, hint: Any, limits: Meta, value: Any
) -> UsageError:
    empty = limits.min_length is not None and not value
    example = example_of(hint)
    return UsageError(
        f"{_named(path)} is {'empty' if empty else f'{bounds(limits)}, not {short(value)}'}",
        where=values.where(path),
        why=reason_of(hint),
        fix=_written(path, example) if example else None,
    )


def _named(path: KeyPath) -> str:
    return printable(dotted(path)) or "the file"


def _written(path: KeyPath, example: str) -> str:
    """Return an example of a field as it stands in a file; one of several lines is a block."""
    block = "\n" in example
    return f"write\n    {path[-1]}:{example}" if block else f"write `{path[-1]}: {example}`"


def short(value: Any) -> str:
    """Return a value as a message shows it, cut after 60 characters."""
    if isinstance(value, Fraction):
        return quoted(value)
    text = printable(repr(value) if isinstance(value, str) else str(value))
    return text if len(text) <= 60 else text[:57] + "..."
