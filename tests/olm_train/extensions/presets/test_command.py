"""`olm-train presets`: a table, JSON, or the part of train.yaml that a preset decides."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from olm_train.estimate.gpus import GPUS
from olm_train.extensions.presets.command import main, table
from olm_train.extensions.presets.recipe import Recipe, recipe
from olm_train.model.presets import PRESETS

STATED = ("h100", "h200")


@functools.cache
def found(name: str, gpu: str) -> Recipe:
    result = recipe(name, GPUS[gpu])
    assert result is not None
    return result


def test_json_says_what_the_recipe_is() -> None:
    result = CliRunner().invoke(main, ["olmo2-7b", "--gpu", "h200", "--json"])
    assert json.loads(result.stdout) == msgspec.to_builtins(found("olmo2-7b", "h200").summary())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["olmo2-7", "--gpu=h100"], "olmo2-7b"), (["olmo2-7b", "--gpu=h1000"], "h100")],
)
def test_a_misspelling_is_a_usage_error(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert f"did you mean '{says}'?" in result.stderr


@pytest.mark.parametrize("gpu", STATED)
def test_the_tables_on_the_page_are_not_stale(gpu: str, repository: Path) -> None:
    page = (repository / "docs" / "reference" / "train-config.md").read_text()
    shown = re.search(
        rf"<!-- recipes of {gpu} -->\n(.*?)\n<!-- end of recipes -->", page, re.DOTALL
    )
    assert shown is not None
    wanted = table(GPUS[gpu], {name: found(name, gpu) for name in PRESETS}, width=80)
    fix = f"stale: paste `olm-train presets --gpu {gpu}`"
    assert shown[1].splitlines() == ["```text", *wanted, "```"], fix


@pytest.mark.parametrize("width", [60, 80])
def test_the_table_fits_a_narrow_terminal(width: int) -> None:
    lines = table(GPUS["h100"], {name: found(name, "h100") for name in PRESETS}, width=width)
    assert max(map(len, lines)) <= width
