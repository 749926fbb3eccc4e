"""Whether the arguments of a call are what its annotations say.

    number, text, true or false -> as fields of train.yaml: `olm_data.config`
    class, object, function     -> isinstance

Pure. Never: an argument's meaning, or what goes with what.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from olm_data.config.convert import parse
from olm_data.config.hints import describe, is_union, plain
from olm_data.config.values import Values, short
from olm_data.errors import UsageError

SIMPLE = (bool, int, float, str, NoneType)
CALLABLE = get_origin(Callable[[], None])


def check_arguments(
    call: Callable[..., Any], given: Mapping[str, object], name: str, *, but: Collection[str] = ()
) -> None:
    """Refuse arguments of other types, or out of bounds.

    Args:
        call: its annotations count.
        given: by name, `locals()` of the call; what has no annotation there is left alone.
        name: of the call, for messages.
        but: arguments with a check of their own.

    Raises:
        UsageError: names the first one.
    """
    hints = get_type_hints(call, include_extras=True)
    for argument, value in given.items():
        if argument in hints and argument not in but:
            _check(argument, hints[argument], value, name)


def _check(argument: str, hint: Any, value: Any, name: str) -> None:
    kinds = _kinds(hint)
    if all(plain(kind)[0] in SIMPLE for kind in kinds):
        if not isinstance(value, str) or str in kinds:  # a file may have a number as text
            parse(hint, Values({argument: value}, file=name), (argument,))
            return
        raise UsageError(
            f"{argument} is {describe(hint)}, not {short(value)}", where=f"{name}({argument}=)"
        )
    if any(_is(value, kind) for kind in kinds):
        return
    words = [_word(kind) for kind in kinds if kind is not NoneType]
    raise UsageError(
        f"{argument} is {' or '.join(words)}, not {_given(value)}", where=f"{name}({argument}=)"
    )


def _kinds(hint: Any) -> list[Any]:
    """Return the alternatives of an annotation; constraints stay with theirs."""
    kind = plain(hint)[0]
    return [each for part in get_args(kind) for each in _kinds(part)] if is_union(kind) else [hint]


def _is(value: Any, kind: Any) -> bool:
    kind = plain(kind)[0]
    if kind is Any:
        return True
    origin = get_origin(kind)
    if origin is type:
        (base,) = get_args(kind)
        return inspect.isclass(value) and issubclass(value, base)
    if origin is CALLABLE:
        return callable(value) and not inspect.isclass(value)
    if origin in (Mapping, dict):
        return isinstance(value, Mapping)
    if origin is not None:
        inner = get_args(kind)[0]
        return (
            isinstance(value, origin)
            and not isinstance(value, str)
            and all(_is(each, inner) for each in value)
        )
    return isinstance(value, kind)


def _word(kind: Any) -> str:
    kind = plain(kind)[0]
    if get_origin(kind) is type:
        return f"a class derived from {get_args(kind)[0].__name__}"
    if get_origin(kind) is CALLABLE:
        return "a function, or an object that is called like one"
    if get_origin(kind) in (Mapping, dict):
        return "a mapping"
    if get_origin(kind) is not None:
        return f"a list of {_word(get_args(kind)[0]).removeprefix('a ').removeprefix('an ')}"
    return "text" if kind is str else f"a {kind.__name__}"


def _given(value: Any) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else f"a {type(value).__name__}"
