"""Values of a mixture manifest by key path, checked, each refusal with its line.

    Document, key path --value_at, mapping_at, number_at, ...--> exact value | UsageError

Never: know what a key means (manifest.py, stage_spec.py).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from olm_data.errors import UsageError, printable
from olm_data.strict_yaml import Document

MAX_TOKENS = 1 << 62
MAX_SEQUENCE_LENGTH = 1 << 24

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)([KMBT])?")
_POWER = {None: 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_tokens(value: Any, where: str) -> int:
    """Return an exact count from `95B`, `1.5M`, `2_000_000` or a YAML number; K M B T are 1000^n.

    Raises:
        UsageError: not a count, not whole, or not in 1 .. 2^62.
    """
    exact: Fraction | None = None
    if isinstance(value, (int, Fraction)) and not isinstance(value, bool):
        exact = Fraction(value)
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        exact = Fraction(match[1].replace("_", "")) * _POWER[match[2]]
    if exact is None:
        raise UsageError(
            f"{shown(value)} is not a number of tokens",
            where=where,
            fix="write a whole number, with K, M, B or T for powers of 1000: 2_000_000, 1.5B, 95B",
        )
    if exact.denominator != 1 or not 1 <= exact <= MAX_TOKENS:
        raise UsageError(
            f"{shown(value)} is not a whole number of tokens from 1 to 2^62", where=where
        )
    return int(exact)


def value_at(document: Document, keys: tuple[str | int, ...]) -> Any:
    """Return the value at a key path that exists."""
    value = document.value
    for key in keys:
        value = value[key]
    return value


def mapping_at(document: Document, keys: tuple[str | int, ...]) -> dict[str, Any]:
    """Return the mapping at a key path; anything else, or an empty one, is refused."""
    value = value_at(document, keys)
    if not isinstance(value, dict) or not value:
        name = printable(str(keys[-1])) if keys else "the manifest"
        raise UsageError(
            f"{name} must be a mapping with at least one `key: value`",
            where=document.where(*keys),
            fix="see docs/reference/mixture.md for an example",
        )
    return value


def number_at(document: Document, keys: tuple[str | int, ...]) -> Fraction:
    """Return the exact number at a key path."""
    value = value_at(document, keys)
    if isinstance(value, bool) or not isinstance(value, (int, Fraction)):
        raise UsageError(
            f"{shown(value)} is not a number",
            where=document.where(*keys),
            fix="write a number without quotes, such as 15 or 0.25",
        )
    return Fraction(value)


def integer_at(document: Document, keys: tuple[str | int, ...], low: int, high: int) -> int:
    """Return the whole number at a key path, from `low` to `high`."""
    value = number_at(document, keys)
    if value.denominator != 1 or not low <= value <= high:
        wanted = f"{low}" if low == high else f"a whole number from {low:,} to {high:,}"
        raise UsageError(f"{keys[-1]} must be {wanted}", where=document.where(*keys))
    return int(value)


def choice_at(document: Document, key: str, choices: tuple[str, ...]) -> str:
    """Return the value of a top-level key that names one of `choices`; the first is the default."""
    value = document.value.get(key, choices[0])
    if value not in choices:
        raise UsageError(
            f"{key} cannot be {shown(value)}",
            where=document.where(key),
            fix=f"this version accepts: {', '.join(choices)}",
        )
    return str(value)


def check_name(name: Any, kind: str, where: str) -> None:
    """Refuse what is no name of a source, stage or group (`kind`)."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{shown(name)} is not a {kind} name",
            where=where,
            fix="use up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first",
        )


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    if isinstance(value, Fraction):
        return f"{float(value):g}"
    return repr(value) if not isinstance(value, str) else f"'{printable(value[:80])}'"
