"""Fields of a recipe are options: their type, choices and help are the field's."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from olm_data.commands.recipe_options import recipe_options

FIELDS = ("text_column", "keep", "limit", "special", "strict_inputs", "slurm", "holdout")
given: list[dict[str, Any]] = []


@click.command()
@recipe_options(*FIELDS, helps={"text_column": "Help of the command's own."})
def command(given: dict[str, Any]) -> None:
    globals()["given"].append(given)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--text-column content", {"text_column": "content"}),
        ("--keep url,score,", {"keep": ["url", "score"]}),
        ("--strict-inputs --special error", {"strict_inputs": True, "special": "error"}),
        ("--slurm --time=1 --slurm --mem=2", {"slurm": ("--time=1", "--mem=2")}),
        ("--holdout 1/8", {"holdout": "1/8"}),
    ],
)
def test_the_command_gets_the_options_that_were_set(words: str, expected: dict[str, Any]) -> None:
    done = CliRunner().invoke(command, words.split())
    assert done.exit_code == 0, done.output
    assert given[-1] == expected


@pytest.mark.parametrize(
    ("words", "says"), [("--special plane", "plain"), ("--strict-input", "--strict-inputs")]
)
def test_what_a_field_does_not_take_is_refused(words: str, says: str) -> None:
    done = CliRunner().invoke(command, words.split())
    assert (done.exit_code, says in done.output) == (2, True), done.output


def test_help_is_that_of_the_field_or_of_the_command() -> None:
    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert "Help of the command's own." in text
    assert all("--" + name.replace("_", "-") in text for name in FIELDS)
