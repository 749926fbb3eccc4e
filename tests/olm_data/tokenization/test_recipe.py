"""A recipe: a file, flags and arguments in Python are one thing with one set of names."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.tokenizing import digests, make_dataset, texts, write_jsonl

import olm_data
from olm_data.cli import cli
from olm_data.commands.add import add
from olm_data.errors import UsageError
from olm_data.tokenization.recipe import Recipe, parse_budget, read_recipe

SELECTED: dict[str, Any] = {"holdout": "1/8", "shard_tokens": 500, "sample": "50%", "seed": 3}


@pytest.fixture
def folder(tiny_tokenizer: Path, tmp_path: Path) -> Path:
    """A folder with text, a tokenizer and a recipe that names both."""
    (tmp_path / "here").mkdir()
    write_jsonl(tmp_path / "here" / "a.jsonl", texts(60))
    (tmp_path / "here" / "tokenizer.json").write_bytes(tiny_tokenizer.read_bytes())
    (tmp_path / "here" / "recipe.yaml").write_text(
        "inputs: [a.jsonl]\ntokenizer: tokenizer.json\noutput: out\nencoder: hf\nworkers: 1\n"
        + "".join(f"{name}: {value}\n" for name, value in SELECTED.items())
    )
    return tmp_path / "here"


def shards(output: Path) -> dict[str, str]:
    """Digests of all files but those that say where the inputs are."""
    return {name: sha for name, sha in digests(output).items() if "job.json" not in name}


def test_file_flags_and_arguments_make_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # paths in a recipe count from its own folder
    done = CliRunner().invoke(cli, ["tokenize", "here/recipe.yaml"])
    assert done.exit_code == 0, done.output
    wanted = shards(folder / "out")
    assert "validation/manifest.json" in wanted
    olm_data.tokenize(folder / "recipe.yaml", output=tmp_path / "python")
    given = {"encoder": "hf", "workers": 1} | SELECTED
    olm_data.tokenize(
        folder / "a.jsonl", tokenizer=folder / "tokenizer.json", output=tmp_path / "all", **given
    )
    make_dataset([folder / "a.jsonl"], folder / "tokenizer.json", tmp_path / "made", **SELECTED)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    words = ["tokenize", "here/a.jsonl", "--tokenizer=here/tokenizer.json", "-o", "flags", *flags]
    assert CliRunner().invoke(cli, words).exit_code == 0
    manifests = {
        json.loads((place / "manifest.json").read_bytes())["digest"]
        for place in (folder / "out", *map(tmp_path.joinpath, ("python", "all", "made", "flags")))
    }
    assert len(manifests) == 1
    assert shards(tmp_path / "flags") == shards(tmp_path / "all")


def test_flags_and_inputs_take_the_place_of_what_the_file_says(folder: Path) -> None:
    recipe = read_recipe([str(folder / "recipe.yaml"), "b.jsonl"], {"seed": 0, "sample": "1%"})
    assert (recipe.inputs, recipe.seed, recipe.sample) == (("b.jsonl",), 0, Fraction(1, 100))
    assert (recipe.tokenizer, recipe.shard_tokens) == (str(folder / "tokenizer.json"), 500)
    (folder / "tokenizer.json").unlink()
    assert (
        read_recipe([str(folder / "recipe.yaml")], {}).tokenizer == "tokenizer.json"
    )  # of the hub


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("hold_out: 1", "did you mean 'holdout'"),
        ("special: plane", "special is one of plain, allow, error"),
        ("holdout: 3", "'3' is not a fraction"),
        ("workers: 0", "workers is at least 1"),
        ("limit: many", "is not a whole number"),
        ("max_bad: some", "neither a count nor a percentage"),
        ("inputs: a.jsonl", "inputs is a list"),
        ("seed: 3", "seed: has no effect"),
    ],
)
def test_a_refusal_names_the_line(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"# a recipe\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read_recipe([str(path)], {})
    assert says in f"{caught.value.what} {caught.value.fix}"
    assert caught.value.where == f"{path}:2"


def test_every_field_is_a_flag_and_every_flag_a_field() -> None:
    own = {"inputs", "dry_run", "as_json"}
    command = cli.get_command(click.Context(cli), "tokenize")
    named = {parameter.name for parameter in command.params} - {"quiet", "verbose", "debug"}
    assert named - own == set(Recipe.__struct_fields__) - {"inputs"}
    added = {parameter.name for parameter in add.params} - {"quiet", "verbose", "debug"}
    assert added - own - {"dataset"} < set(Recipe.__struct_fields__)


@pytest.mark.parametrize(
    ("text", "bad", "records", "allowed"),
    [
        ("0.1%", 1, 1000, True),
        ("0.1%", 2, 1000, False),
        ("0", 0, 5, True),
        ("0", 1, 5, False),
        ("25", 25, 30, True),
        ("100%", 30, 30, True),
    ],
)
def test_the_budget_is_a_share_or_a_count(text: str, bad: int, records: int, allowed: bool) -> None:
    assert parse_budget(text).allows(bad, records) is allowed


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "", "%", "101%", "-1%", "nan", "1e400%"])
def test_an_odd_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_budget(text)
