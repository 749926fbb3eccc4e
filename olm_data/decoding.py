"""Values of a type, decoded or converted by msgspec from any thread.

    decode_typed(bytes, type) | convert(value, type) | decoder(type)
        `-> the first time for a type: its fields are looked at under one lock

msgspec (0.22) keeps what it found of a class on the class before all of it is there. A thread that
decodes at that moment takes half of it for the whole, and the process is gone with SIGSEGV. Hence
the lock, and hence nobody else calls msgspec with a type.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from olm_data.process_lock import ProcessLock

T = TypeVar("T")

_lock = ProcessLock()
_seen: set[Any] = set()
"""Types whose fields msgspec has looked at."""


def decode_typed(data: bytes | msgspec.Raw, type: type[T]) -> T:
    """Return the value of a JSON text, which is of the type.

    Raises:
        msgspec.DecodeError: it is no JSON, or not of the type.
    """
    _look_at(type)
    return msgspec.json.decode(data, type=type)


def convert(value: Any, type: type[T], *, from_attributes: bool = False) -> T:
    """Return a value of plain types, or the attributes of an object, as the type.

    Raises:
        msgspec.ValidationError: it is not of the type.
    """
    _look_at(type)
    return msgspec.convert(value, type, from_attributes=from_attributes)


def decoder(type: type[T]) -> msgspec.json.Decoder[T]:
    """Return a decoder of JSON texts, for a type that is used often or made at run time."""
    with _lock.held():
        return msgspec.json.Decoder(type)


def _look_at(type: Any) -> None:
    if type not in _seen:
        decoder(type)
        _seen.add(type)
