"""The arguments of a call, read as fields of a configuration are.

    number, text, true or false, a choice -> the value, as of a field of train.yaml
    class, object, function               -> isinstance

Pure.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from os import PathLike
from types import NoneType
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from olm_data.config.convert import choices, describe, is_union, parse, plain
from olm_data.config.values import Values, short
from olm_data.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

SIMPLE = (bool, int, float, str, NoneType)
CALLABLE = get_origin(Callable[[], None])


def checked(*but: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a call: its arguments are read by its annotations, text becomes the choice it names.

    Args:
        but: arguments with a check of their own; without annotation one is left alone too.

    Returns:
        A decorator. The call raises UsageError: names the first argument of another type, or out
        of bounds.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        owner, _, own = call.__qualname__.rpartition(".")
        name, signature = owner if own == "__init__" else own, inspect.signature(call)

        @functools.wraps(call)
        def read(*given: P.args, **named: P.kwargs) -> R:
            hints = get_type_hints(call, include_extras=True)
            try:
                bound = signature.bind(*given, **named)
            except TypeError:  # Python says it, with the names of the call
                return call(*given, **named)
            for argument, value in bound.arguments.items():
                if argument in hints and argument not in but:
                    bound.arguments[argument] = _read(argument, hints[argument], value, name)
            return call(*bound.args, **bound.kwargs)

        return read

    return decorate


def _read(argument: str, hint: Any, value: Any, name: str) -> Any:
    kinds = _kinds(hint)
    if all(map(_is_plain, kinds)):
        # A file may have a number as text, a call not.
        if not isinstance(value, str) or str in kinds or choices(hint):
            return parse(hint, Values({argument: value}, file=name), (argument,))
        raise UsageError(
            f"{argument} is {describe(hint)}, not {short(value)}", where=f"{name}({argument}=)"
        )
    if any(_is(value, kind) for kind in kinds):
        return value
    words = [_word(kind) for kind in kinds if kind is not NoneType]
    given = f"the class {value.__name__}" if inspect.isclass(value) else f"a {type(value).__name__}"
    raise UsageError(
        f"{argument} is {' or '.join(words)}, not {given}", where=f"{name}({argument}=)"
    )


def _is_plain(kind: Any) -> bool:
    kind = plain(kind)[0]
    return kind in SIMPLE or isinstance(kind, EnumType) or get_origin(kind) is Literal


def _kinds(hint: Any) -> list[Any]:
    """Return the alternatives of an annotation; constraints stay with theirs."""
    kind = plain(hint)[0]
    return [each for part in get_args(kind) for each in _kinds(part)] if is_union(kind) else [hint]


def _is(value: Any, kind: Any) -> bool:
    kind = plain(kind)[0]
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return True
    if origin is type:
        return inspect.isclass(value) and issubclass(value, inner[0])
    if origin is CALLABLE:
        return callable(value) and not inspect.isclass(value)
    if not isinstance(value, Mapping if origin is dict else origin) or not inner:
        return isinstance(value, origin) and not inner
    several = issubclass(origin, Sequence)
    return not isinstance(value, str) and (not several or all(_is(v, inner[0]) for v in value))


def _word(kind: Any) -> str:
    kind = plain(kind)[0]
    if get_origin(kind) is type:
        return f"a class derived from {get_args(kind)[0].__name__}"
    if get_origin(kind) is CALLABLE:
        return "a function, or an object that is called like one"
    if get_origin(kind) in (Mapping, dict):
        return "a mapping"
    if get_origin(kind) is PathLike:
        return "a path"
    if get_origin(kind) is not None:
        return f"a list of {_word(get_args(kind)[0]).removeprefix('a ').removeprefix('an ')}"
    return "text" if kind is str else f"a {kind.__name__}"
