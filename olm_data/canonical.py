"""Canonical JSON and digests: the one spelling of a value, and its sha256.

Canonical JSON is UTF-8, keys sorted, no spaces, strings unescaped except where JSON demands it, and
integers only: a float, NaN or a date is refused, so that a digest never depends on how a number is
printed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON bytes of `value` (dicts, lists, str, int, bool, None).

    Raises:
        TypeError: the value holds a float or another type that has no single spelling.
    """
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


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
