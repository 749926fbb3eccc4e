"""Numbers as people write them, read and spelled.

    parse_count    `100000`, `1.5M`, `95B`       scaled         `12.3 M`
    parse_share    `0.001`, `1/1000`, `0.1%`     duration       `3 min 20 s`
    counted        `1 document`, `2 documents`
    spell_ranges   `0-2,5`

K, M, B and T are 1000^n.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from olm_data.errors import UsageError, quoted

MAX_COUNT = 1 << 62
MAX_SEQUENCE_LENGTH = 1 << 24

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


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: `1 document`, `1,234 documents`, `2 entries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("y") else f"{number:,} {noun}s"


def scaled(number: float) -> str:
    """Return a number with three digits and a suffix: `12.3 M`."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= 0.9995 * size:  # so that 999,999 is 1 M and not 1e+03 K
            return f"{number / size:.3g} {suffix}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Return seconds in words: `42 s`, `3 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02} h"


def spell_ranges(numbers: Iterable[int], separator: str = ",") -> str:
    """Return `0-2,5` for ascending numbers 0, 1, 2, 5; "" for none."""
    return separator.join(f"{a}-{b}" if b > a else f"{a}" for a, b in stretches(numbers))


def stretches(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the stretches (first, last) of ascending numbers, each as long as can be."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return tuple((first, last) for first, last in found)
