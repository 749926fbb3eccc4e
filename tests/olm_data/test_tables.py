"""Tables on the terminal: cells stand under each other, whatever their letters take."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from olm_data.errors import printable
from olm_data.tables import aligned, shortened, shortened_end, table


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


@given(st.text(max_size=40).map(printable), st.integers(1, 50))
def test_a_text_cut_at_its_end_fits(text: str, width: int) -> None:
    assert cell_len(shortened_end(text, width)) <= width


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_word_and_no_number_is_broken_however_narrow_the_terminal(width: int) -> None:
    made = table(("source", "tokens available", "rows drawn", "share"), title="run: 2 sources")
    made.add_row("fineweb-edu", "1,234,567,890,123", "12,345,678", "50.0000%")
    made.add_row("code", "3,898", "", "50.0000%")
    page = Console(file=io.StringIO(), width=width)
    page.print(made)
    shown = page.file.getvalue()  # type: ignore[attr-defined]
    for whole in ("fineweb-edu", "tokens available", "1,234,567,890,123", "12,345,678", "50.0000%"):
        assert whole in shown
    assert max(map(cell_len, shown.splitlines())) <= width
