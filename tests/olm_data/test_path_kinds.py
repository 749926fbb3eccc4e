"""AUDIT rows U5 and U6: one thing given for another is named for what it is, with what to type."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command import Olm
from support.project import Project
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.errors import OlmError
from olm_data.mixture.mix import mix
from olm_data.path_kinds import kind_of, nearest, require
from olm_data.sources.formats import CODECS, FORMATS, format_of


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A folder with one thing of each kind, by its name."""
    root = tmp_path_factory.mktemp("things")
    write_jsonl(root / "text.jsonl", texts(20))
    make_dataset([root / "text.jsonl"], tiny_tokenizer, root / "dataset")
    (root / "unfinished").mkdir()
    (root / "unfinished" / "plan.json").write_bytes((root / "dataset" / "plan.json").read_bytes())
    (root / "mix.yaml").write_text(
        "version: 1\nseed: 1\nsequence_length: 16\n"
        "sources: {web: {data: ./dataset, max_epochs: 9}}\n"
        "stages: [{name: main, tokens: 64, weights: {web: 1}}]\n"
    )
    mix(str(root / "mix.yaml"))
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("text")
    (root / "run" / "step10").mkdir(parents=True)
    (root / "empty").mkdir()
    os.mkfifo(root / "pipe")
    (root / "tokenizer.json").write_bytes(tiny_tokenizer.read_bytes())
    return root


KINDS = {
    "text.jsonl": "text",
    "dataset": "dataset",
    "dataset/manifest.json": "dataset",
    "unfinished": "unfinished dataset",
    "mix.yaml": "mixture",
    "mix.lock.json": "lock",
    "texts": "text folder",
    "run": "run",
    "empty": "empty folder",
    "pipe": "special",
    "tokenizer.json": "tokenizer",
    "missing": None,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_thing_is_known_by_what_it_holds(things: Path, name: str) -> None:
    assert kind_of(str(things / name)) == KINDS[name]


def test_what_is_read_as_text_is_known_as_text(tmp_path: Path) -> None:
    for ending in FORMATS:
        for codec in ("", *CODECS):
            path = tmp_path / f"a{ending}{codec}"
            path.write_text("x")
            assert (kind_of(str(path)) == "text") == (format_of(path.name) is not None), path.name


WRONG = [
    ("mix dataset", "this is a dataset, not a mixture manifest"),
    ("mix mix.lock.json", "this is a mixture lock, not a mixture manifest"),
    ("report dataset", "this is a dataset, not a mixture lock"),
    ("report mix.yaml", "compile it first: olm-data mix"),
    ("stats mix.lock.json", "this is a mixture lock, not a dataset"),
    (
        "show document text.jsonl",
        "olm-data tokenize text.jsonl --tokenizer FILE --output text-tokens",
    ),
    ("stats texts", "olm-data tokenize texts --tokenizer FILE --output texts-tokens"),
    ("show document mix.yaml", "compile it first: olm-data mix mix.yaml"),
    ("verify text.jsonl", "this is a file of text, not a dataset"),
    ("verify mix.yaml", "this is a mixture manifest, not a dataset"),
    ("verify texts", "this is a folder of text, not a dataset"),
    ("stats run", "olm-data report LOCK --run run"),
    ("show row pipe", "this is a pipe, a socket or a device, not a dataset"),
    ("show step text.jsonl 1 --global-batch 64", "this is a file of text, not a mixture lock"),
    ("show step dataset 1 --global-batch 64", "this is a dataset, not a mixture lock"),
    ("export text.jsonl --to datatrove --output x", "this is a file of text, not a dataset"),
    ("add texts text.jsonl", "this is a folder of text, not a dataset"),
    ("mix mix.lock.json --compare-packing", "this is a mixture lock, not a mixture manifest"),
    ("status mix.lock.json", "this is a mixture lock, not a dataset"),
    ("work texts --tasks 0", "this is a folder of text, not a dataset that is not finished"),
    ("doctor text.jsonl --clean", "this is a file of text, not a folder"),
    ("doctor text.jsonl", "this is a file of text, not a folder"),
    ("tokenize dataset --tokenizer tokenizer.json --output x", "this is a dataset, not a file"),
    ("tokenize mix.yaml --tokenizer tokenizer.json --output x", "this is a mixture manifest"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[words for words, _ in WRONG])
def test_no_command_calls_a_wrong_thing_an_error_of_the_disk(
    things: Path, words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(things)
    before = sorted(path.name for path in things.rglob("*"))
    error = CliRunner().invoke(cli, words.split()).exception
    assert isinstance(error, OlmError), repr(error)
    assert error.exit_code in (2, 4)
    assert said in str(error)
    assert "run the same command again; finished" not in str(error)
    assert sorted(path.name for path in things.rglob("*")) == before


def test_u6_no_advice_says_to_write_among_the_text(
    things: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(things)
    for words in ("stats texts", "verify texts", "status texts", "add texts text.jsonl"):
        error = str(CliRunner().invoke(cli, words.split()).exception)
        assert "--output texts-tokens" in error
        assert "--output texts\n" not in f"{error}\n"


def test_a_mixture_names_text_where_a_dataset_should_be(things: Path) -> None:
    wrong = things / "wrong.yaml"
    wrong.write_text((things / "mix.yaml").read_text().replace("./dataset", "./text.jsonl"))
    try:
        with pytest.raises(OlmError, match="this is a file of text, not a dataset"):
            mix(str(wrong))
    finally:
        wrong.unlink()


def test_names_of_things_reach_the_terminal_escaped(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m\n.txt"
    path.write_text(json.dumps({}))
    with pytest.raises(OlmError) as caught:
        require(str(path), "dataset")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("notes.md", 'The lock says `"format": "olm-mixture-lock"`.', "text"),
        ("a.txt", '"added_tokens" and "model" are its keys', "text"),
        ("m.lock.json", '{"format": "olm-mixture-lock"}', "lock"),
        ("t.json", '{"added_tokens": [], "model": {}}', "tokenizer"),
    ],
)
def test_a_text_that_speaks_of_a_thing_is_a_text(
    name: str, content: str, kind: str, here: Path
) -> None:
    (here / name).write_text(content)
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("mix.yml", "mix.yaml"),
        ("texte", "texts"),
        ("datset/", "dataset"),
        ("datset/validation", "dataset"),
        ("txts/a.txt", "texts/a.txt"),
        ("run/step01", "run/step10"),
        ("quite another thing", None),
        ("another.jsonl", None),  # it has the ending of text.jsonl, and nothing else
        ("mix.yaml", None),  # it is there: what is wrong with it is another matter
        ("s3://bucket/datset", None),
    ],
)
def test_a_path_that_leads_nowhere_is_answered_by_what_lies_beside_it(
    things: Path, monkeypatch: pytest.MonkeyPatch, typed: str, meant: str | None
) -> None:
    monkeypatch.chdir(things)
    for place in (typed, str(things / typed) if "://" not in typed else typed):
        base = f"{things}/" if place != typed else ""
        said = f"did you mean '{base}{meant}'?" if meant else "look"
        assert nearest(place, "look") == said


_MAKE = ["--tokenizer", "{}/tokenizer.json", "--output", "{}/new"]


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "{}/datset"],
        ["stats", "{}/datset"],
        ["status", "{}/datset"],
        ["mix", "{}/mixx.yaml"],
        ["report", "{}/mixx.lock.json"],
        ["show", "row", "{}/mixx.lock.json", "0"],
        ["tokenize", "{}/text.json", *_MAKE],
        ["tokenize", "{}/text.jsonl", *_MAKE, "--tokenizer", "{}/tokeniser.json"],
        ["tokenize", "{}/text.jsonl", *_MAKE, "--exclude-ids", "{}/texts/aa.txt"],
    ],
    ids=lambda command: " ".join(command[::4]),
)
def test_every_command_names_what_was_probably_meant(things: Path, command: list[str]) -> None:
    done = CliRunner().invoke(cli, [word.format(things) for word in command])
    assert isinstance(done.exception, OlmError)
    assert f"fix: did you mean '{things}/" in str(done.exception)


def advised(said: str, label: str) -> list[str]:
    """Return the words of the command that a message advises."""
    found = re.search(rf"{label}: (?:.*: )?olm-data (.*)", said)
    assert found, said
    return shlex.split(found[1])


def test_a_trained_tokenizer_is_used_by_the_command_that_is_printed(here: Path, olm: Olm) -> None:
    (here / "my texts").mkdir()
    write_jsonl(here / "my texts" / "a.jsonl", texts(20))
    words = ["--vocab-size", "300", "-o", "my tok.json", "--text-column", "text"]
    said = olm("train-tokenizer", "my texts", *words)
    assert said.returncode == 0, said.stderr
    said = olm(*advised(said.stderr, "next"), "--workers", "1", "--dry-run")
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("given", [".", "./", "../here", "./a b.jsonl"])
def test_text_given_for_a_dataset_is_made_one_by_the_command_that_is_printed(
    given: str, monkeypatch: pytest.MonkeyPatch, olm: Olm, project: Project
) -> None:
    here = project / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    write_jsonl(here / "a b.jsonl", texts(5))
    said = olm("show", "document", given)
    assert said.returncode == 4
    words = advised(said.stderr, "fix")
    words[words.index("FILE")] = str(project.tokenizer)
    said = olm(*words, "--workers", "1")
    assert said.returncode == 0, said.stderr


def test_links_to_nowhere_say_where_they_lead(here: Path, tiny_tokenizer: Path, olm: Olm) -> None:
    (here / "gone").symlink_to("nothing-there")
    (here / "loop").symlink_to("loop")
    for name, target in (("gone", "nothing-there"), ("loop", "loop")):
        said = olm("tokenize", name, "--tokenizer", tiny_tokenizer, "-o", "out")
        assert said.returncode == 4
        assert f"why: it leads to {target}\n" in said.stderr
        assert "did you mean" not in said.stderr


def test_a_dataset_is_known_by_its_manifest_and_is_no_import(
    here: Path, tiny_tokenizer: Path, olm: Olm
) -> None:
    make_dataset([write_jsonl(here / "a.jsonl", texts(5))], tiny_tokenizer, here / "ds")
    said = olm("status", "ds/manifest.json", "--json")
    assert (said.returncode, json.loads(said.stdout)["state"]) == (0, "complete")
    said = olm("import", "ds", "--tokenizer", tiny_tokenizer, "-o", "out")
    assert (said.returncode, "this is a dataset, not" in said.stderr) == (4, True)
