"""Values to typed configurations, `parse`, and back to plain values, `as_dict`.

    Values, dataclass or Struct --fields, unions, mappings, lists--> configuration | UsageError
    single values: msgspec.convert        configuration --as_dict--> JSON values

Generic: knows dataclasses and their annotations, nothing of what they are for. What is wrong with
a value is found and worded here; `Values` knows the place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from itertools import chain
from operator import ge, gt, le, lt
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from olm_data.config.hints import (
    ExtraFields,
    FilePath,
    Needs,
    OneOf,
    Parts,
    ReadBy,
    bounds,
    example_of,
    reason_of,
    within,
)
from olm_data.config.import_path import import_path, is_import_path, load_class
from olm_data.config.values import KeyPath, Values, dotted, short
from olm_data.counts import parse_count
from olm_data.decoding import convert
from olm_data.errors import OlmError, UsageError, nearest_of, printable, suggest
from olm_data.plugins import names, ours, path_of
from olm_data.redaction import MASK, hold, is_credential

T = TypeVar("T")

_MOST_PLACES = 3
SIMPLE = {
    int: "an integer",
    float: "a number",
    Fraction: "a number",
    str: "text",
    bool: "true or false",
    FilePath: "a path",
    type(None): "null",
}


class Config:
    """Base of a dataclass whose fields are read alike wherever it is made, in Python and in a file.

    Text becomes the member that it names, a mapping the section that it stands for; what the
    annotation does not allow is refused. A `__post_init__` of the dataclass's own calls
    `super().__post_init__()` first.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        here = Values({}, file=kind.__name__)
        for name, field in fields_of(kind).items():
            found = _convert(field.hint, getattr(self, name), here, (name,))
            object.__setattr__(self, name, found)
        _refuse_useless(self)


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
    `token`, `password`), is a credential: it is `***` instead. A part of one's own has its import
    path as `name`.
    """
    return _as_plain(config, None, "")


def _as_plain(value: Any, hint: Any, key: str, *, secret: bool = False) -> Any:
    """Return what stands under a key, in a place with that annotation, as JSON values."""
    if (secret and value is not None) or is_credential(key, value):
        hold(str(value))  # from here on no text of this process shows it
        return MASK
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_as_plain(item, None, "") for item in value]
    kind, parts = plain(hint)[0], parts_of(hint)
    if isinstance(value, Mapping):
        inner = get_args(kind)[1] if get_origin(kind) is dict else None
        return {str(name): _as_plain(item, inner, str(name)) for name, item in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    found = dict[str, Any]()
    if parts is not None and type(value) not in kinds_of(kind):  # a part of one's own
        if isinstance(value, parts.wrapper or ()):
            return _as_plain(value.plain(), None, "")
        if (place := import_path(type(value))) != ours(parts.group).get(key):
            found["name"] = place
    try:
        known = fields_of(type(value))
    except NameError:  # an annotation that cannot be resolved: of no class that `parse` makes
        known = {}
    for field in dataclasses.fields(value):
        hint = known[field.name].hint if field.name in known else None
        item = _as_plain(getattr(value, field.name), hint, field.name, secret=not field.repr)
        found |= item if ExtraFields() in plain(hint)[1] else {field.name: item} | found
    return found


def _convert(hint: Any, value: Any, values: Values, path: KeyPath) -> Any:
    kind, notes = plain(hint)
    numpy = sys.modules.get("numpy")  # a number of it cannot be given before it is loaded
    value = value.item() if numpy is not None and isinstance(value, numpy.generic) else value
    if isinstance(value, str) and tags_of(kind):
        value = {"name": value}
    for note in notes:
        if isinstance(note, ReadBy):
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
        found = convert(_whole(value, values) if kind is int else value, kind)
    except msgspec.ValidationError:
        raise _wrong_type(values, path, hint, value) from None
    if isinstance(found, float) and not math.isfinite(found):
        raise _wrong_type(values, path, hint, value)
    return found


def _whole(value: Any, values: Values) -> Any:
    """Return the integer that `1e6` or `95B` spells, anything else as it is."""
    if isinstance(value, float | Fraction) and value == value // 1:
        return int(value)
    if isinstance(value, str) and not values.digits_only:
        with contextlib.suppress(UsageError):
            return parse_count(value)
    return value


def _is_part(parts: Parts, kind: Any, value: Any) -> bool:
    """Whether a value is, or names, a part of one's own."""
    if not isinstance(value, dict):
        return isinstance(value, parts.base) and is_section(type(value))
    name = value.get("name")
    sections = filter(is_section, kinds_of(kind))
    known = [each for one in sections for each in _names(one)]
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
            fix="decorate it with @dataclass(kw_only=True), with frozen=True where its base has "
            f"it, and write all methods that {parts.base.__name__} leaves open",
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
    text = isinstance(value, str)
    for kind in sorted(kinds, key=lambda kind: not text or value not in choices(kind)):
        if is_section(kind) and not isinstance(value, (dict, str, kind)):
            continue  # without wording why
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
    fields, rest = fields_of(kind), rest_of(kind)
    known = [name for name in fields if name != rest]
    parsed = {
        name: _convert(fields[name].hint, item, values, (*path, name))
        for name, item in given.items()
        if name in known
    }
    others = {name: item for name, item in given.items() if name not in known}
    if rest is not None:
        parsed[rest] = _others(fields[rest].hint, others, known, values, path)
    elif others:
        raise unknown_field(values, (*path, next(iter(others))), known)
    for name, field in fields.items():
        if name not in parsed and field.default is None:
            raise _missing(values, (*path, name), field.hint)
    return _placed(lambda: _refuse_useless(kind(**parsed)), fields, values, path)


def _refuse_useless(section: T) -> T:
    """Return a section in which no field was given that has no effect beside the others."""
    kind: Any = type(section)
    for name, field in fields_of(kind).items():
        for note in plain(field.hint)[1]:
            given = field.default and getattr(section, name) != field.default()
            if isinstance(note, Needs) and given and note.missing(section):
                joined = "without" if note.unless is None else "with"
                raise UsageError(
                    f"has no effect {joined} {note}",
                    where=name,
                    fix="leave it out, or change the other one",
                )
    return section


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
                if isinstance(item, dict) and "name" not in fields_of(kind):  # its name, once more
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


def _read(reader: ReadBy, value: Any, values: Values, path: KeyPath) -> Any:
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
        f"{_named(path)} is {describe(hint)}, not {short(value)}", where=values.where(path), fix=fix
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


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a dataclass or Struct.

    Attributes:
        hint: its annotation, with what `Annotated` adds.
        default: makes its default value, None: it has none.
        shown: whether that is a plain value, not made anew each time.
    """

    hint: Any
    default: Callable[[], Any] | None
    shown: bool = False


@functools.cache
def fields_of(config: Any) -> Mapping[str, Field]:
    """Return what can be given to a dataclass or Struct, by name, in order."""
    struct = isinstance(config, type) and issubclass(config, msgspec.Struct)
    found = msgspec.structs.fields(config) if struct else dataclasses.fields(config)
    hints = get_type_hints(config, include_extras=True)
    missing, fields = (dataclasses.MISSING, msgspec.NODEFAULT), dict[str, Field]()
    for each in found:
        shown = each.default not in missing
        make = (lambda value=each.default: value) if shown else each.default_factory
        if getattr(each, "init", True):
            default = None if make in missing else make
            fields[each.name] = Field(hints[each.name], default, shown)
    return fields


def is_section(kind: Any) -> bool:
    """Whether a mapping with known fields stands for `kind`: a dataclass or a Struct."""
    return dataclasses.is_dataclass(kind) or (
        isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    )


def plain(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type within `Annotated`, and what was added to it."""
    if get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__
    return hint, ()


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union but None; of any other type itself alone."""
    if is_union(hint):
        return tuple(kind for kind in get_args(hint) if kind is not type(None))
    return (hint,)


def is_union(hint: Any) -> bool:  # `A | B`
    return get_origin(hint) in (Union, types.UnionType)


def parts_of(hint: Any) -> Parts | None:
    """Return what else a section may be, None: nothing."""
    return next((note for note in plain(hint)[1] if isinstance(note, Parts)), None)


def rest_of(config: Any) -> str | None:
    """Return the field of a section that takes the names it does not know, None: there is none."""
    fields = fields_of(config).items()
    return next((name for name, field in fields if ExtraFields() in plain(field.hint)[1]), None)


def tags_of(hint: Any) -> list[Any]:
    """Return the names that stand for a section of this type; none where it may be no section."""
    kinds = kinds_of(plain(hint)[0])
    return [name for kind in kinds for name in _names(kind)] if all(map(is_section, kinds)) else []


def _names(section: Any) -> list[Any]:
    """Return what a section may give as its kind."""
    name = fields_of(section).get("name")
    return [] if name is None else choices(name.hint)


def name_of(kind: Any) -> Any:
    """Return what a configuration calls a component of this kind: its `name`, None without."""
    name = fields_of(kind).get("name")
    return name and name.default and name.default()


def choices(hint: Any) -> list[Any]:
    """Return the values that a Literal, an enum, a `OneOf`, or a union with some of them has."""
    kind, notes = plain(hint)
    for note in notes:
        if isinstance(note, OneOf):
            return list(note.names())
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.value for member in kind]
    if is_union(kind):
        return [choice for inner in get_args(kind) for choice in choices(inner)]
    return []


def describe(hint: Any) -> str:
    """Return what a message calls a value of this type, such as "a number or null"."""
    kind, notes = plain(hint)
    for note in notes:
        if isinstance(note, ReadBy):
            return note.says
    if is_union(kind):
        return " or ".join(describe(inner) + within(inner) for inner in get_args(kind))
    if given := choices(hint):
        return "one of " + ", ".join(str(choice) for choice in given)
    if kind in SIMPLE:
        return SIMPLE[kind]
    origin = get_origin(kind)
    if origin in (list, tuple):
        return f"a list ({describe(get_args(kind)[0])} each)"
    if origin in (dict, Mapping):
        return f"a mapping of names ({describe(get_args(kind)[1])} each)"
    if is_section(kind):
        return f"a mapping with {', '.join(fields_of(kind))}"
    return getattr(kind, "__name__", str(kind))


def mapping_of(hint: Any, value: Any) -> str | None:
    """Return the section that a lone number may stand for, its first field; None: it is none.

    Shown are the fields without a default; a choice is the first one.
    """
    kind = next((kind for kind in kinds_of(hint) if is_section(kind)), None)
    if kind is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    needed = {name: field.hint for name, field in fields_of(kind).items() if field.default is None}
    known = [choices(hint)[:1] for hint in [*needed.values()][1:]]
    if not needed or not all(known):
        return None
    given = zip(needed, [value, *chain(*known)], strict=True)
    return f"{{{', '.join(f'{name}: {each}' for name, each in given)}}}"
