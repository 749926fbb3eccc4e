"""olm-data mix: what each option does, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.small_datasets import random_shards, write_dataset

from olm_data.cli import cli
from olm_data.errors import UsageError
from olm_data.packing.packings import PACKINGS

COMPARE = ("mix", "--compare-packing")


LENGTHS = [[5, 3, 9, 24, 1, 1, 6], [1, 1, 1], [40, 8, 8, 8], [2, 30, 1], [7] * 20, [64, 16, 17]]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "web"
    shards = random_shards(1, LENGTHS)
    write_dataset(path, [[ids + 1 for ids in shard] for shard in shards], vocab_size=50_001)
    return path


def test_a_sample_says_that_it_is_one(dataset: Path) -> None:
    result = CliRunner().invoke(
        cli, [*COMPARE, str(dataset), "--documents", "10", "--sequence-length", "8,16"]
    )
    assert result.exit_code == 0, result.output
    assert "the first 10 documents of 40" in result.stdout
    assert result.stdout.count("rows of") >= 2


def test_json_and_page_hold_the_same_numbers(dataset: Path, tmp_path: Path) -> None:
    page = tmp_path / "packing.html"
    result = CliRunner().invoke(cli, [*COMPARE, str(dataset), "--json", "--html", str(page)])
    found = json.loads(result.stdout)
    assert [one["packing"] for one in found] == list(PACKINGS)
    assert f"{found[0]['tokens']:,}" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tree"], "--tree is for a lock; this writes none"),
        (["--dry-run"], "--dry-run is for a lock; this writes none"),
        (["--sequence-length", "8,x"], "are not sequence lengths"),
    ],
)
def test_options_without_effect_are_refused(dataset: Path, words: list[str], message: str) -> None:
    error = CliRunner().invoke(cli, [*COMPARE, str(dataset), *words]).exception
    assert isinstance(error, UsageError)
    assert message in str(error)
    for option in ("--documents", "--sequence-length", "--html"):
        error = CliRunner().invoke(cli, ["mix", "manifest.yaml", option, "8"]).exception
        assert f"{option} is for --compare-packing" in str(error)
