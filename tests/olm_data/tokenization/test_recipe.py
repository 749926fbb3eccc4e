"""A recipe: names of its fields, what it names found, which records it takes."""

from __future__ import annotations

import gzip
import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.project import Project
from support.reading import resolve_source
from support.tokenizing import digests, make_dataset, make_request, texts, write_jsonl

import olm_data
from olm_data.cli import cli
from olm_data.commands.add import add
from olm_data.errors import InputError, UsageError
from olm_data.sources import plan_units, read_units
from olm_data.tokenization import request
from olm_data.tokenization.recipe import Recipe, parse_budget, read_recipe
from olm_data.tokenization.select_documents import select_documents

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


def test_inputs_of_the_plan_do_not_depend_on_where_they_lie(project: Project) -> None:
    plans = []
    for folder in ("x", "y"):
        (project / folder).mkdir()
        files = [write_jsonl(project / folder / f"{k}.jsonl", texts(9)) for k in range(2)]
        plans.append(make_request(files, project.tokenizer).plan.digest)
    assert plans[0] == plans[1]


def test_a_file_name_that_is_no_unicode_is_refused(project: Project) -> None:
    source = project.write("a.jsonl", texts(3))
    odd = source.rename(project / os.fsdecode(b"\xff.jsonl"))
    with pytest.raises(InputError, match="UTF-8") as caught:
        project.make([odd])
    assert str(caught.value).isascii()


def test_a_long_input_that_cannot_be_cut_is_named_beforehand(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    plain = project.write("plain.jsonl", texts(300))
    packed = project / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert make_request([packed, plain], project.tokenizer).notes == ()
    monkeypatch.setattr(request, "LONG_TASK", 1000)
    (note,) = make_request([packed, plain], project.tokenizer).notes
    assert "packed.jsonl.gz: about" in note
    assert "(1 such input)" in note


def test_what_is_complete_is_said_to_be_without_proving_an_encoder(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    file = project.write("a.jsonl", texts(30))
    project.make([file])
    monkeypatch.delattr(request, "find_encoder")
    assert project.make([file]).already_complete


@pytest.mark.parametrize("separator", [None, "blank-lines"])
def test_text_files_end_at_a_limit_too(separator: str | None, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} {k}" for k in range(4)))
    source = resolve_source([str(tmp_path)], separator=separator)
    documents = {None: 2, "blank-lines": 8}[separator]
    for limit in range(1, documents + 2):
        chosen = select_documents(source, limit=limit)
        units = [
            unit
            for index, input in enumerate(chosen.inputs)
            for unit in plan_units(index, input, chosen.options, 1 << 20)
        ]
        read = list(read_units(chosen.inputs, units, chosen.options))
        assert sum(batch.documents for batch in read) == min(limit, documents)
        assert sum(batch.rows_in for batch in read) == min(limit, documents)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sample": Fraction(0)}, UsageError, "more than nothing"),
        ({"exclude_ids": "{}/0.jsonl"}, UsageError, "in text files"),
        ({"exclude_ids": "{}/gone.txt"}, InputError, "no such file"),
        ({"exclude_ids": "{}/empty.txt"}, InputError, "holds no id"),
        ({"exclude_ids": "{}/odd.txt"}, InputError, "not valid UTF-8"),
    ],
)
def test_a_selection_that_cannot_be_made_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "0.jsonl", texts(3))
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "odd.txt").write_bytes(b"good\nalso\n\xff\n")
    options = {n: v.format(tmp_path) if isinstance(v, str) else v for n, v in options.items()}
    with pytest.raises(error, match=message) as caught:
        select_documents(resolve_source([str(tmp_path / "0.jsonl")]), **options)
    if "odd" in str(options):
        assert "odd.txt, line 3" in str(caught.value)


def test_records_without_ids_cannot_be_left_out_by_id(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "ids.txt").write_text("one")
    source = resolve_source([str(tmp_path / "a.jsonl")])
    with pytest.raises(InputError, match="no ids to leave out by") as caught:
        select_documents(source, exclude_ids=str(tmp_path / "ids.txt"))
    assert "--id-column" in str(caught.value.fix)
