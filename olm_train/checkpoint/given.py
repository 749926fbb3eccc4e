"""What callbacks and other parts of one's own give to a checkpoint: mappings by name.

Never: what is done with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from olm_data.errors import UsageError, printable

T = TypeVar("T")


def mapping_of(
    callback: str, method: str, given: Mapping[str, T], kind: type[Any] = object
) -> Mapping[str, T]:
    """Return what a method of a callback gave.

    Args:
        callback: its name.
        kind: of the values.

    Raises:
        UsageError: it is no mapping, a name is no text, or a value of another kind.
    """
    where = f"{method}() of the callback {printable(callback)!r}"
    if not isinstance(given, Mapping) or any(not isinstance(name, str) for name in given):
        found = type(given).__name__
        raise UsageError(
            f"{where} returned a {found}{' with a name that is no text' * (found == 'dict')}",
            fix="return a mapping by name; an empty one if there is nothing",
        )
    for name, value in given.items():
        if not isinstance(value, kind):
            raise UsageError(
                f"{where} returned a {type(value).__name__} as {printable(name)!r}",
                why=f"each value is a {kind.__name__}",
                fix="numbers, text and lists belong in state_dict()",
            )
    return given
