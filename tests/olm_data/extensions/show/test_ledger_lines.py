"""`olm-data show ledger`: its options, its lines, its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.ledgers import write_ledger

from olm_data.cli import cli
from olm_data.errors import UsageError


def show(*words: object) -> Result:
    return CliRunner().invoke(cli, ["show", "ledger", *map(str, words)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    pieces = [("web", n, 0, 0, 10, 2.0 + n) for n in range(4)]
    again = [("web", n, 0, 1, 10, 1.0) for n in range(4)]
    write_ledger(tmp_path, {1: pieces, 2: [*again, ("code", 0, 0, 0, 5, 3.0)], 4: again})
    return tmp_path


def test_each_view_has_its_tables(run: Path) -> None:
    text = show(run, "--top", 2).output
    assert "missing   1\n" in text
    assert text.count("\n  web:") == 4
    assert "\n  code " not in show(run, "--source", "web").output
    step = show(run, "--step", 1, "--top", 1).output
    assert step.splitlines()[-1].split()[:5] == ["web:3", "0", "10", "10", "5.0000"]
    losses = [line.split()[4] for line in show(run, "--document", "web:2").output.splitlines()[3:]]
    assert losses == ["4.0000", "1.0000", "1.0000"]


def test_json_has_all_of_it(run: Path) -> None:
    assert json.loads(show(run, "--json").output)["repeated"] == 4
    assert json.loads(show(run, "--step", 2, "--json").output)["labels"] == 45
    assert json.loads(show(run, "--document", "web:1", "--json").output)["address"] == "web:1"


def test_options_that_would_have_no_effect_are_refused(run: Path) -> None:
    error = show(run, "--document", "web:1", "--step", 1).exception
    assert isinstance(error, UsageError)
    assert "--document is shown in all steps" in str(error)
