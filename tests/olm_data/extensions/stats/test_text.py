"""What the command of stats prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from olm_data.cli import cli
from olm_data.errors import InputError
from olm_data.extensions.stats.count import collect
from olm_data.extensions.stats.page import percent


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_percentage_is_nothing_or_all_only_where_it_is_so(part: int, more: int) -> None:
    text = percent(part, part + more)
    assert (text == "0 %") == (part == 0)
    assert (text == "100 %") == (part > 0 and more == 0)


def test_the_command_prints_text_json_and_a_page(folder: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["stats", str(folder / "out")])
    assert re.search(r"^  a.parquet .* 2 empty ", shown.stdout, re.M)
    assert f"next: olm-data show document {folder / 'out'} " in shown.stderr
    words = ["stats", str(folder / "out"), "--json", "--html", str(tmp_path / "s.html")]
    value = json.loads(CliRunner().invoke(cli, words).stdout)
    assert value["inputs"][0]["path"] == "a.parquet"
    assert set(value["histogram"][0]) == {"first", "last", "documents", "tokens"}
    assert (tmp_path / "s.html").is_file()
    with pytest.raises(InputError):
        collect(str(tmp_path))
