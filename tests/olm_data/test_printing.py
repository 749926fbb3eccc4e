"""What is printed of a result, numbers among it: cells stand under each other, spelled one way."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from rich.cells import cell_len
from support.html_page import HtmlPage

from olm_data.counts import (
    MAX_COUNT,
    counted,
    duration,
    parse_count,
    parse_share,
    scaled,
    spell_ranges,
)
from olm_data.errors import UsageError, printable
from olm_data.page import svg, whole_numbers
from olm_data.printing import (
    Columns,
    Difference,
    Loss,
    Ordinal,
    Share,
    aligned,
    as_html,
    cell,
    emit,
    lines,
    record,
    shortened,
    table,
)


@given(st.text(max_size=40).map(printable), st.integers(1, 50))
def test_a_shortened_name_fits_and_keeps_both_ends(text: str, width: int) -> None:
    short = shortened(text, width)
    assert cell_len(short) <= width
    assert short == text or "\u2026" in short


def test_columns_are_aligned_and_long_names_lose_their_middle() -> None:
    assert aligned([("name", "1"), ("x" * 40, "22"), ("\u4f60" * 3, "3")], 30) == [
        "name" + " " * 24 + " 1",
        "x" * 12 + "\u2026" + "x" * 13 + "  22",
        "\u4f60" * 3 + " " * 22 + " 3",
    ]


def test_columns_may_all_stand_at_the_left_and_no_cell_is_markup() -> None:
    rows = [("ok", "[bold]a", "1"), ("", "", "fix: b"), ("fail", "c", "[/] " + "x" * 300)]
    assert aligned(rows, left=(0, 1, 2)) == [
        "ok    [bold]a  1",
        "               fix: b",
        "fail  c        [/] " + "x" * 300,
    ]
    assert aligned([]) == []


class Row(msgspec.Struct, kw_only=True):
    """What `table` is asked to show."""

    source: str
    number: Ordinal
    tokens: int
    share_got: Share
    capped: bool = False
    usual: Loss | None = None
    dropped: dict[str, int] = {}


class Gap(msgspec.Struct, kw_only=True):
    """A difference."""

    stage: str
    rows: Difference


ROWS = [
    Row(source="fineweb-edu", number=1000, tokens=1_234_567, share_got=0.5),
    Row(source="code", number=2000, tokens=0, share_got=0.0, usual=2.0),
]


def test_a_table_has_a_column_for_each_field_that_some_row_has_a_value_of() -> None:
    assert table(ROWS, width=80) == [
        "source       number     tokens  share got   usual",
        "fineweb-edu    1000  1,234,567   50.0000%",
        "code           2000          0          0  2.0000",
    ]
    assert table([], "source") == []


def test_a_sum_is_shown_as_what_it_sums() -> None:
    rows = [Gap(stage="a", rows=3), Gap(stage="b", rows=0)]
    assert table(rows, total=True, width=80) == [
        "stage  rows",
        "a        +3",
        "b         0",
        "total    +3",
    ]


def test_columns_are_chosen_named_and_summed_but_for_ordinals() -> None:
    assert table(ROWS, "source=of", "number", "tokens", total=True, indent="  ", width=80) == [
        "  of           number     tokens",
        "  fineweb-edu    1000  1,234,567",
        "  code           2000          0",
        "  total                1,234,567",
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_no_word_and_no_number_is_broken_however_narrow_the_terminal(width: int) -> None:
    shown = table(ROWS, width=width)
    assert max(map(cell_len, shown)) <= max(width, 22)
    for whole in ("fineweb-edu", "share got", "1,234,567", "50.0000%"):
        assert any(whole in line for line in shown)


def test_a_record_leaves_out_what_has_no_value_and_breaks_between_words() -> None:
    values = {"made": "a b", "none": None, "no": "", "not read": ["x", "y"], "zero": 0}
    assert record(values, width=80) == ["  made      a b", "  not read  x", "  not read  y"]
    assert record({"made": "word " * 9}, width=40) == [
        "  made  word word word word word word",
        "        word word word",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234, "1,234"),
        (12.3456, "12.35"),
        (True, "yes"),
        (False, ""),
        (None, ""),
        (UNSET, ""),
        ({"empty": 1200, "bad": 1}, "1,200 empty, 1 bad"),
        ([1, 2], "1, 2"),
        ("a\x1b[31m", "a\\x1b[31m"),
    ],
)
def test_a_value_as_a_cell(value: object, shown: str) -> None:
    assert cell(value) == shown


class Part(msgspec.Struct):
    """A block inside a result."""

    name: str
    rows: list[Gap]


class Result(msgspec.Struct):
    """A result with every kind of field."""

    ok: bool
    tokens: int
    lost: int
    names: list[str]
    shares: dict[str, float]
    dropped: dict[str, int]
    digest: str
    best: Gap | None
    rows: list[Row]
    parts: list[Part]

    COLUMNS: ClassVar = {
        "names": Columns(most=2),
        "digest": None,
        "rows": Columns(("source", "tokens"), most=1, name="sources"),
    }


def test_a_result_is_a_line_a_field_and_a_block_for_each_that_holds_structs() -> None:
    gap = Gap(stage="a", rows=3)
    result = Result(
        *(False, 1_234, 0, ["x", "y", "z"], {"web": 0.5}, {"empty": 2, "bad": 1}, "abc", gap),
        *(ROWS, [Part("one", [gap]), Part("two", [])]),
    )
    assert lines(result, width=80) == [
        "ok       no",
        "tokens   1,234",
        "names    x",
        "names    y",
        "names    and 1 more (--json shows all)",
        "shares   web: 0.5",
        "dropped  2 empty, 1 bad",
        "best",
        "  stage  a",
        "  rows   +3",
        "sources",
        "  source          tokens",
        "  fineweb-edu  1,234,567",
        "  and 1 more (--json shows all)",
        "parts",
        "  name  one",
        "  rows",
        "    stage  rows",
        "    a        +3",
        "  name  two",
    ]


def test_a_result_is_its_fields_as_json_or_lines_without_secrets_or_escapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    emit(ROWS, as_json=True)
    assert [one["source"] for one in json.loads(capsys.readouterr().out)] == ["fineweb-edu", "code"]
    emit(ROWS, False, ["\x1b[2J https://user:pass@host/x"])
    out = capsys.readouterr().out
    assert "\\x1b[2J" in out
    assert "pass@" not in out


def test_a_notebook_shows_a_record_and_nothing_of_it_acts() -> None:
    values = {"name": "<img src=//x> & https://user:pass@host/ \x1b[2J", "rows": 3_000, "none": 0}
    page = HtmlPage(as_html(values))
    shown = "".join(page.text).splitlines()
    assert page.fetched == []
    assert shown[0].startswith("name  <img src=//x> & https://")
    assert shown[0].endswith("host/ \\x1b[2J")
    assert "pass@" not in shown[0]
    assert shown[1:] == ["rows  3,000"]


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


def test_an_axis_of_counts_has_whole_numbers() -> None:
    drawn = svg(lambda axes: (axes.plot([1, 2], [0, 1]), whole_numbers(axes.xaxis)), "counts")
    labels = re.findall(r">([\d.,]+)</text>", drawn)
    assert {"1", "2"} <= set(labels)
    assert "1.2" not in labels
