"""Counts are read exactly, or refused with the way to write them; numbers are spelled one way."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.counts import (
    MAX_COUNT,
    counted,
    duration,
    parse_count,
    parse_share,
    scaled,
    spell_ranges,
)
from olm_data.errors import UsageError


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("1", 1),
        ("100_000", 100_000),
        ("100K", 100_000),
        ("1.5m", 1_500_000),
        ("2B", 2 * 10**9),
        ("0.000001T", 10**6),
        (7, 7),
        (Fraction(8, 2), 4),
        (MAX_COUNT, 1 << 62),
    ],
)
def test_counts_are_read_exactly(written: Any, number: int) -> None:
    assert parse_count(written) == number


@given(st.integers(1, 10**6), st.sampled_from("KMBT"))
def test_a_letter_is_a_power_of_a_thousand(number: int, letter: str) -> None:
    assert parse_count(f"{number}{letter}") == number * 1000 ** ("KMBT".index(letter) + 1)


@pytest.mark.parametrize(
    "written",
    [
        *("0", "-1", "1.5", "1.2345K", "1e6", "", "K", "nan", "1 000", "5G", "9999999T"),
        *(0, -5, True, None, [1], Fraction(1, 2), MAX_COUNT + 1),
    ],
)
def test_what_is_no_count_is_refused(written: Any) -> None:
    with pytest.raises(UsageError, match=r"is not a whole number from 1 to 2\^62") as refused:
        parse_count(written, "here")
    assert refused.value.where == "here"
    assert "1.5M or 95B" in str(refused.value.fix)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (42, "42 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (1e5, "1 d 03 h"),
    ],
)
def test_durations_are_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_large_numbers_are_scaled() -> None:
    numbers = (0.5, 999, 1e4, 999_999, 2.5e9, 1e12)
    assert [scaled(n) for n in numbers] == ["0.5", "999", "10 K", "1 M", "2.5 B", "1 T"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3, 4], "1, 3-4")]
)
def test_numbers_in_a_row_are_a_range(numbers: list[int], text: str) -> None:
    assert spell_ranges(numbers, ", ") == text


def test_shares_are_exact() -> None:
    assert parse_share("0.001", "--holdout") == Fraction(1, 1000)
    assert parse_share("1/3", "--holdout") == Fraction(1, 3)
    assert parse_share("0.1%", "--holdout") == Fraction(1, 1000)
    for odd in ("1", "-0.1", "2", "x", "1/0", "nan", "inf"):
        with pytest.raises(UsageError):
            parse_share(odd, "--holdout")


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (0, "document", "0 documents"),
        (1, "document", "1 document"),
        (1234, "document", "1,234 documents"),
        (1, "entry", "1 entry"),
        (2, "entry", "2 entries"),
    ],
)
def test_one_thing_is_no_plural(number: int, noun: str, words: str) -> None:
    assert counted(number, noun) == words
