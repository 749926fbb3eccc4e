"""Values of a mixture manifest by key path, checked, each refusal with its line.

    Document, key path --value_at, mapping_at, number_at, ...--> exact value | UsageError

Never: know what a key means (manifest.py, stage_spec.py).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from olm_data.config.strict_yaml import Document
from olm_data.errors import UsageError, printable, quoted

MAX_SEQUENCE_LENGTH = 1 << 24

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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
            f"{quoted(value)} is not a number",
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
            f"{key} cannot be {quoted(value)}",
            where=document.where(key),
            fix=f"this version accepts: {', '.join(choices)}",
        )
    return str(value)


def check_name(name: Any, kind: str, where: str) -> None:
    """Refuse what is no name of a source, stage or group (`kind`)."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{quoted(name)} is not a {kind} name",
            where=where,
            fix="use up to 64 letters, digits, `.`, `_` and `-`, a letter or digit first",
        )
