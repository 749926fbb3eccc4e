"""Counts and shares as people write them: `100000`, `1.5M`, `95B`; `0.001`, `1/1000`, `0.1%`.

K, M, B and T are 1000^n.
"""

from __future__ import annotations

import re
from fractions import Fraction

from olm_data.errors import UsageError, quoted

MAX_COUNT = 1 << 62

_WRITTEN = re.compile(r"([0-9][0-9_]{0,30}(?:\.[0-9]{1,30})?)([KMBT]?)", re.IGNORECASE)
_POWER = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(value: object, where: str | None = None) -> int:
    """Return the exact whole number from 1 to 2^62 that a text or a YAML number spells.

    Raises:
        UsageError: it spells none.
    """
    exact: Fraction | None = None
    if isinstance(value, (int, Fraction)) and not isinstance(value, bool):
        exact = Fraction(value)
    elif isinstance(value, str) and (match := _WRITTEN.fullmatch(value.strip())):
        exact = Fraction(match[1].replace("_", "")) * _POWER[match[2].upper()]
    if exact is None or exact.denominator != 1 or not 1 <= exact <= MAX_COUNT:
        raise UsageError(
            f"{quoted(value)} is not a whole number from 1 to 2^62",
            where=where,
            fix="write it like 2_000_000, 100K, 1.5M or 95B; K, M, B and T are powers of 1000",
        )
    return int(exact)


def parse_share(text: str, option: str, *, allow_one: bool = False) -> Fraction:
    """Return the exact fraction that `0.001`, `1/1000` or `0.1%` spells, at least 0 and below 1.

    Args:
        allow_one: 1 and `100%`, which are all there is, too.

    Raises:
        UsageError: it is none.
    """
    try:
        if len(text) > 40 or re.search(r"[eE][-+]?\w{3}", text):
            raise ValueError  # a number of so many digits that it would fill the memory
        share = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not (0 <= share < 1 or (allow_one and share == 1)):
        raise UsageError(
            f"{option} {text!r} is not a fraction from 0 to 1", fix="write 0.001, 1/1000 or 0.1%"
        )
    return share
