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
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

FilePath = NewType("FilePath", str)
"""A local path or URL. Relative ones in a file count from that file's folder."""

_TITLE = re.compile(r"[A-Z]\w+:$")
_SIMPLE = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Reader:
    """Annotation of a value with a written form of its own: `Annotated[int, Reader(...)]`.

    Attributes:
        read: the value of the file -> the value of the field; raises `UsageError` without a place.
        says: what messages and the reference page call it, such as "a count".
        schema: JSON Schema of what may be written.
    """

    read: Callable[[Any], Any]
    says: str
    schema: Mapping[str, Any]


@functools.cache
def hints_of(config: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields, with what `Annotated` adds."""
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


def name_of(kind: Any) -> Any:
    """Return what a configuration calls a component of this dataclass: its `name`, None without."""
    return next((f.default for f in dataclasses.fields(kind) if f.name == "name"), None)


def choices(hint: Any) -> list[Any]:
    """Return the values that a Literal, an enum, or a union with some of them has."""
    kind, _ = plain(hint)
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
    limits = [bounds(note) for note in notes if isinstance(note, Meta)]
    if limits:
        return ", ".join([describe(kind), *limits])
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind is FilePath:
        return "a path"
    if kind is type(None):
        return "null"
    if is_union(kind):
        return " or ".join(describe(inner) for inner in get_args(kind))
    if given := choices(kind):
        return "one of " + ", ".join(str(choice) for choice in given)
    origin = get_origin(kind)
    if origin in (list, tuple):
        return f"a list ({describe(get_args(kind)[0])} each)"
    if origin in (dict, Mapping):
        return f"a mapping of names ({describe(get_args(kind)[1])} each)"
    if dataclasses.is_dataclass(kind):
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        return f"a mapping with {names}"
    return getattr(kind, "__name__", str(kind))


def bounds(meta: Meta) -> str:
    """Return a constraint in words: "at least 1", "above 0 and at most 10", "2 or more values"."""
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
