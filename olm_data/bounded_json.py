"""JSON from outside, read within bounds: nesting, width of integers, keys that stand once.

    bytes --check (no object is made)--> decode (msgspec, typed where the caller has a type)
                                            `-> every key of the text is in the value, or refused

The check looks at brackets, digits and control bytes outside strings, a piece at a time, so a file
of brackets or of zeros is refused at the cost of one piece. A typed decode then stops at the first
value that does not fit. Sizes are the concern of who reads the file (`regular_files.py`).

Also: canonical JSON and digests: the one spelling of a value, and its sha256.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, overload

import msgspec

from olm_data.counts import MAX_COUNT
from olm_data.decoding import decode_typed
from olm_data.errors import printable
from olm_data.regular_files import refuse_large

MAX_DEPTH = 64
MAX_DIGITS = 20
"""Digits of an integer: those of 2^64 - 1. `Size` and the callers' own types say more."""

PIECE = 1 << 20
_SMALL = 1 << 16  # bytes: below, to split at quotes is faster than arrays

T = TypeVar("T")

JsonObject = dict[str, Any]
"""A JSON object whose keys somebody else chose: a user's record, another program's file."""

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""A count or size in a typed text."""

_NO_LIMIT = re.compile(rb'("model_max_length"\s*:\s*)[0-9]{21,}')
_ESCAPE = re.compile(rb"\\.?", re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_WIDE = re.compile(rb"(?<![.0-9])[0-9]{%d}" % (MAX_DIGITS + 1))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""From a bracket to what it adds to the depth, int8."""


class Sparse(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base of an object in a file: a field with its default is left out, an unknown one refused.

    Subclasses say `frozen=True, kw_only=True` again, for type checkers.
    """


class MalformedJson(ValueError):
    """The bytes are no JSON that this package writes; the text says why and holds none of them."""


@overload
def decode(data: bytes) -> Any: ...
@overload
def decode(data: bytes, type: type[T]) -> T: ...
def decode(data: bytes, type: Any = Any) -> Any:
    """Return the value of a JSON text.

    Args:
        type: what it must be, as msgspec converts it.

    Raises:
        MalformedJson: it is no JSON, not of the type, nested too deeply, holds an integer that is
            too wide, or a key twice.
    """
    keys = check([data])
    try:
        value = decode_typed(data, type)
        plain = value if type is Any else msgspec.json.decode(data)
        again = msgspec.json.encode(plain)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
        raise MalformedJson(printable(str(error))[:200]) from None
    if keys != sum(part.count(b":") for part in _outside([again])):
        raise MalformedJson("a key stands twice in one object")
    return value


def decode_own(
    data: bytes, type: type[T], spelled: Callable[[T], Sequence[bytes]], known: str | None = None
) -> tuple[T, str]:
    """Return the value of a text that this package writes, and the sha256 of its first part.

    One pass: a value with the digest that is wanted is the one that was meant; of another text
    without an escape, the value's own has fewer colons exactly if the text holds something that
    the value lacks. Any other text is read as `decode` reads it.

    Args:
        spelled: makes the parts of the value's JSON, each key once.
        known: the digest that is wanted, from a text that was read before.

    Raises:
        MalformedJson: as `decode`.
    """
    try:
        value = decode_typed(data, type)
        parts = spelled(value)
        digest = hashlib.sha256(parts[0]).hexdigest()
        if digest == known or (
            b"\\" not in data and data.count(b":") == sum(part.count(b":") for part in parts)
        ):
            return value, digest
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError):
        pass  # `decode` says what it is
    value = decode(data, type)
    return value, hashlib.sha256(spelled(value)[0]).hexdigest()


def decode_object(data: bytes) -> JsonObject:
    """Return the value of a JSON text that is an object. Raises as `decode`."""
    return decode(data, JsonObject)


def decode_configuration(data: bytes) -> JsonObject:
    """Return the value of a configuration that transformers writes. Raises as `decode`.

    A length without a limit is the number int(1e30) there, of 31 digits; here it is None.
    """
    return decode_object(_NO_LIMIT.sub(rb"\1null", data))


def check(pieces: Iterable[bytes]) -> int:
    """Check the bounds of a JSON text that comes in pieces; return its colons: one for each key.

    Raises:
        MalformedJson: too deep, an integer that is too wide, or control bytes.
    """
    depth = keys = 0
    before = b""
    for part in _outside(pieces):
        keys += part.count(b":")
        if _WIDE.search(before + part):
            raise MalformedJson(f"an integer of more than {MAX_DIGITS} digits")
        before = part[-MAX_DIGITS - 1 :]
        opened = part.count(b"[") + part.count(b"{")
        if depth + opened <= MAX_DEPTH:
            depth += opened - part.count(b"]") - part.count(b"}")
        else:
            import numpy as np  # most texts need it neither here nor below

            steps = part.translate(_STEPS, _NOT_BRACKETS)
            levels = np.cumsum(np.frombuffer(steps, np.int8), dtype=np.int32)
            if depth + int(levels.max()) > MAX_DEPTH:
                raise MalformedJson(f"more than {MAX_DEPTH} levels of nesting")
            depth += int(levels[-1])
    return keys


def gathered(pieces: Iterable[bytes], limit: int, where: str) -> bytes:
    """Return a JSON text that comes in pieces; of one that begins as none does, the first is held.

    Raises:
        MalformedJson: its beginning is not within bounds, or it has a hole, as a sparse file has.
        ValidationError: it has more than `limit` bytes.
    """
    parts, size = list[bytes](), 0
    for piece in pieces:
        if not parts:
            check([piece[:_SMALL]])
        parts.append(piece)
        size += len(piece)
        refuse_large(size, limit, where)
        if b"\0" in piece:
            raise MalformedJson("control bytes: this is not text")
    return b"".join(parts)


def _outside(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what of a JSON text stands outside strings, in pieces; refuse control bytes."""
    inside, rest = 0, b""
    for piece in _cut(pieces):
        if _CONTROL.search(piece):
            raise MalformedJson("control bytes: this is not text")
        text = rest + piece
        rest = b"\\" * ((len(text) - len(text.rstrip(b"\\"))) % 2)  # its other half comes next
        text = _ESCAPE.sub(b"", text[: len(text) - len(rest)])
        quotes = text.count(b'"')
        if len(text) <= _SMALL:
            parts = text.split(b'"')
            yield b"".join(parts[inside::2])
        else:
            import numpy as np

            found = np.frombuffer(text, np.uint8)
            parity = np.cumsum(found == ord('"'), dtype=np.uint8) + np.uint8(inside)
            yield found[((parity & 1) == 0) & (found != ord('"'))].tobytes()
        inside ^= quotes & 1


def _cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), PIECE):
            yield piece[start : start + PIECE]


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON bytes of `value` (dicts, lists, str, int, bool, None).

    Raises:
        TypeError: the value holds a float or another type that has no single spelling.
    """
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def indented(value: object) -> bytes:
    """Return a Struct, or plain values, as indented JSON, a line break last."""
    return json.dumps(msgspec.to_builtins(value), indent=1).encode() + b"\n"


def digest(value: Any) -> str:
    """Return the sha256 (64 lower-case hex digits) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: str | Path) -> str:
    """Return the sha256 of a local file, read in bounded pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_floats(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"canonical JSON has string keys only, not {key!r}")
            _refuse_floats(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_floats(item)
    elif not isinstance(value, (str, int, type(None))):
        raise TypeError(f"canonical JSON holds str, int, bool and null only, not {value!r}")
