"""Counts as people write them: `100000`, `2_000_000`, `1.5M`, `95B`; K, M, B and T are 1000^n."""

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
