"""Counts are read exactly, or refused with the way to write them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.counts import MAX_COUNT, parse_count
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
