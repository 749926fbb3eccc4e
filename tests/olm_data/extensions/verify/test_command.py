"""olm-data verify: what each option does, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command import Olm

from olm_data.cli import cli
from olm_data.errors import UsageError


def test_the_command_says_it_was_a_sample_and_how_to_read_the_rest(olm: Olm, made: Path) -> None:
    done = olm("verify", made, "--sample", "1%", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert "sample        1/100\n" in done.stdout
    assert f"next: olm-data verify {made}   reads every byte" in done.stderr


@pytest.mark.parametrize("words", [["--sample", "0"], ["--seed", "3"], ["--root", "."]])
def test_options_that_would_do_nothing_are_refused(words: list[str], made: Path) -> None:
    assert isinstance(CliRunner().invoke(cli, ["verify", str(made), *words]).exception, UsageError)
