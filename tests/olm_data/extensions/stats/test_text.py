"""What stats prints fits the width there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from olm_data.cli import cli
from olm_data.errors import InputError
from olm_data.extensions.stats.count import Stats, collect
from olm_data.extensions.stats.text import bar, percent, stats_lines


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_text_fits_the_width_and_holds_no_control_characters(stats: Stats, width: int) -> None:
    lines = stats_lines(stats, width)
    assert all(cell_len(line) <= width for line in lines[1:])
    assert all(line.isprintable() for line in lines)
    assert "2 inputs" in lines


@given(st.floats(0, 1), st.integers(1, 80))
def test_a_bar_is_as_long_as_its_share(share: float, width: int) -> None:
    drawn = bar(share, width)
    assert abs(len(drawn) - share * width) <= 1
    assert bar(1.0, width) == "\u2588" * width
    assert bar(0.0, width) == ""


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_percentage_is_nothing_or_all_only_where_it_is_so(part: int, more: int) -> None:
    text = percent(part, part + more)
    assert (text == "0 %") == (part == 0)
    assert (text == "100 %") == (part > 0 and more == 0)


def test_the_command_prints_text_json_and_a_page(folder: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["stats", str(folder / "out")])
    assert "2 inputs" in shown.stdout
    assert f"next: olm-data show document {folder / 'out'} " in shown.stderr
    words = ["stats", str(folder / "out"), "--json", "--html", str(tmp_path / "s.html")]
    value = json.loads(CliRunner().invoke(cli, words).stdout)
    assert value["inputs"][0]["path"] == "a.parquet"
    assert set(value["histogram"][0]) == {"first", "last", "documents", "tokens"}
    assert (tmp_path / "s.html").is_file()
    with pytest.raises(InputError):
        collect(str(tmp_path))
