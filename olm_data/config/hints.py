"""What the annotations of a configuration say: kinds of values, constraints, and words for both.

    Annotated[int, Meta(ge=1)] --describe, bounds--> "an integer", "at least 1"

Pure: reads types, never values of a file.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from fractions import Fraction
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from olm_data.counts import parse_count
from olm_data.plugins import load, ours

FilePath = NewType("FilePath", str)
"""A local path or URL. Relative ones in a file count from that file's folder."""

Schema = dict[str, Any]
"""A JSON Schema."""

Annotations = dict[str, Any]
"""Field -> its type; Python has no type for these."""

_TITLE = re.compile(r"[A-Z]\w+:$")
_SIMPLE = {
    int: "an integer",
    float: "a number",
    Fraction: "a number",
    str: "text",
    bool: "true or false",
}


LocalPath = Annotated[FilePath, Meta(pattern="^(?!.*://)", description="a folder on a local disk")]
"""A path that is no URL."""


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """Annotation of a value with a written form of its own: `Annotated[int, Reader(...)]`.

    Attributes:
        read: the value of the file -> the value of the field; raises `UsageError` without a place.
        says: what messages and the reference page call it, such as "a count".
        schema: JSON Schema of what may be written.
    """

    read: Callable[[Any], Any]
    says: str
    schema: Schema


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Annotation of a text that is one of the names which a registry has when it is read."""

    names: Callable[[], Iterable[str]]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Annotation of a section that may also be somebody else's dataclass, named by import path.

    Attributes:
        base: what the class has to be a subclass of.
        group: entry points by which packages give such classes a short name.
        wrapper: a section, derived from `base`, that stands for classes of another kind, its
            `wraps`: made by its `of(path, class, options)`, shown by its `plain()`. None: there is
            none.
    """

    base: type
    group: str
    wrapper: Any = None


@dataclasses.dataclass(frozen=True)
class ExtraFields:
    """Annotation of the field that takes the names which a section does not know: a mapping."""


Count = Annotated[int, Reader(parse_count, "a count", {"type": ["integer", "string"]})]
"""A whole number of at least 1, which may be written `100K`, `1.5M` or `95B`."""


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Proportion = Annotated[float, Meta(ge=0, le=1)]
"""A part of a whole, from 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a dataclass or Struct.

    Attributes:
        default: makes its default value, None: it has none.
        shown: whether that is a plain value, not made anew each time.
    """

    name: str
    default: Callable[[], Any] | None
    shown: bool = False


@functools.cache
def fields_of(config: Any) -> tuple[Field, ...]:
    """Return what can be given to a dataclass or Struct, in order."""
    if isinstance(config, type) and issubclass(config, msgspec.Struct):
        found = [(f.name, f.default, f.default_factory) for f in msgspec.structs.fields(config)]
    else:
        here = dataclasses.fields(config)
        found = [(f.name, f.default, f.default_factory) for f in here if f.init]
    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    return tuple(
        Field(name, factory if factory not in missing else None)
        if value in missing
        else Field(name, functools.partial(_same, value), shown=True)
        for name, value, factory in found
    )


def _same(value: Any) -> Any:
    return value


def is_section(kind: Any) -> bool:
    """Whether a mapping with known fields stands for `kind`: a dataclass or a Struct."""
    return dataclasses.is_dataclass(kind) or (
        isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    )


@functools.cache
def hints_of(config: Any) -> Annotations:
    """Return the annotations of a section's fields, with what `Annotated` adds."""
    return get_type_hints(config, include_extras=True)


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


def is_union(hint: Any) -> bool:
    """Whether `hint` is `A | B`."""
    return get_origin(hint) in (Union, types.UnionType)


def parts_of(hint: Any) -> Parts | None:
    """Return what else a section may be, None: nothing."""
    return next((note for note in plain(hint)[1] if isinstance(note, Parts)), None)


def rest_of(config: Any) -> str | None:
    """Return the field of a section that takes the names it does not know, None: there is none."""
    return next(
        (n for n, hint in hints_of(config).items() if ExtraFields() in plain(hint)[1]), None
    )


def parts_by_name(hint: Any) -> dict[str, Any]:
    """Return the classes that this distribution brings for extra fields, by name."""
    parts = parts_of(get_args(plain(hint)[0])[1])
    return {} if parts is None else {n: load(parts.group, n) for n in ours(parts.group)}


def summary_of(kind: type) -> str:
    """Return the first sentence of a class's docstring."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split()).removesuffix(".")


def tags_of(hint: Any) -> list[Any]:
    """Return the names that stand for a section of this type; none where it may be no section."""
    kinds = kinds_of(plain(hint)[0])
    if not all(map(is_section, kinds)):
        return []
    return [name for kind in kinds for name in choices(hints_of(kind).get("name"))]


def name_of(kind: Any) -> Any:
    """Return what a configuration calls a component of this kind: its `name`, None without."""
    found = next((field.default for field in fields_of(kind) if field.name == "name"), None)
    return found and found()


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
        if isinstance(note, Reader):
            return note.says
    if any(isinstance(note, OneOf) for note in notes):
        return "one of " + ", ".join(choices(hint))
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind is FilePath:
        return "a path"
    if kind is type(None):
        return "null"
    if is_union(kind):
        return " or ".join(describe(inner) + _within(inner) for inner in get_args(kind))
    if given := choices(kind):
        return "one of " + ", ".join(str(choice) for choice in given)
    origin = get_origin(kind)
    if origin in (list, tuple):
        return f"a list ({describe(get_args(kind)[0])} each)"
    if origin in (dict, Mapping):
        return f"a mapping of names ({describe(get_args(kind)[1])} each)"
    if is_section(kind):
        names = ", ".join(field.name for field in fields_of(kind))
        return f"a mapping with {names}"
    return getattr(kind, "__name__", str(kind))


def example_of(hint: Any) -> str | None:
    """Return what `Meta(examples=[...])` shows of a value, as it stands in a file after the key."""
    return next((note.examples[0] for note in _metas(hint) if note.examples), None)


def mapping_of(hint: Any, value: Any) -> str | None:
    """Return the section that a lone number may stand for, its first field; None: it is none.

    Shown are the fields without a default; a choice is the first one.
    """
    kind = next((kind for kind in kinds_of(hint) if is_section(kind)), None)
    if kind is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    first, *others = [field.name for field in fields_of(kind) if field.default is None] or [""]
    shown = [f"{first}: {value}"]
    for name in others:
        if not (known := choices(hints_of(kind)[name])):
            return None
        shown.append(f"{name}: {known[0]}")
    return f"{{{', '.join(shown)}}}" if first else None


def reason_of(hint: Any) -> str | None:
    """Return why a value is needed or limited: `Meta(description=...)` without a pattern."""
    said = (note.description for note in _metas(hint) if note.pattern is None)
    return next((text for text in said if text), None)


def _metas(hint: Any) -> list[Meta]:
    return [note for note in plain(hint)[1] if isinstance(note, Meta)]


def _within(hint: Any) -> str:
    limits = [words for note in _metas(hint) if (words := bounds(note))]
    return f" ({', '.join(limits)})" if limits else ""


def bounds(meta: Meta) -> str:
    """Return a constraint in words: "at least 1", "above 0 and at most 10", "2 or more values"."""
    if meta.ge is not None and meta.ge == meta.le:
        return f"{meta.ge}"
    said = [
        f"{word} {limit:g}" if isinstance(limit, float) else f"{word} {limit:,}"
        for word, limit in (
            ("at least", meta.ge),
            ("above", meta.gt),
            ("at most", meta.le),
            ("below", meta.lt),
        )
        if limit is not None
    ]
    if meta.min_length is not None:
        said.append("not empty" if meta.min_length == 1 else f"{meta.min_length} or more long")
    if meta.pattern is not None:
        said.append(meta.description or f"text of the form {meta.pattern}")
    return " and ".join(said)


def attributes(config: type[Any]) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say of its fields, on one line."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        _, _, section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition(
            "\nAttributes:\n"
        )
        names: list[str] = []
        for line in section.splitlines():
            field = re.fullmatch(r" {4}((?:\w+, )*\w+): (.*)", line)
            if _TITLE.match(line):
                break
            if field is not None:
                names = field[1].split(", ")
                found.update(dict.fromkeys(names, field[2]))
            elif line.strip():
                found.update({name: f"{found[name]} {line.strip()}" for name in names})
    return found
