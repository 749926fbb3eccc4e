"""Nothing is written to nowhere, to the root, or among a user's own files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from support.project import Project
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.errors import ConflictError, OlmError, UsageError
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import Store, refuse_no_place

NOWHERE = ["", " ", "/", "//", "/.", "/tmp/..", "file:///", "///"]


def run(words: Sequence[str]) -> BaseException | None:
    return CliRunner().invoke(cli, list(words)).exception


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(5))


@pytest.mark.parametrize("place", NOWHERE)
def test_no_store_is_nowhere_or_at_the_root(place: str) -> None:
    with pytest.raises(UsageError):
        Store(place)
    with pytest.raises(UsageError):
        refuse_no_place(place)


@pytest.mark.parametrize("place", ["", "/"])
def test_no_command_acts_on_nowhere_or_the_root(
    here: Path, text: Path, place: str, project: Project
) -> None:
    tokenizer = ["--tokenizer", str(project.tokenizer)]
    project.make([text], "data")
    before = sorted(os.listdir("/")), sorted(os.listdir(here))
    for words in (
        ["tokenize", str(text), *tokenizer, "--output", place],
        ["tokenize", str(text), *tokenizer, "--output", place, "--dry-run"],
        ["import", "x.npy", *tokenizer, "--output", place],
        ["export", "data", "--to", "datatrove", "--output", place],
        ["mix", "mix.yaml", "--output", place],
        ["report", "mix.lock.json", "--output", place],
        ["stats", "data", "--html", place],
        ["train-tokenizer", str(text), "--output", place],
        ["add", place, str(text)],
        ["show", "document", place],
        *([command, place] for command in ("verify", "stats", "doctor", "status")),
        ["work", place, "--tasks", "0"],
    ):
        assert words[0] in cli.list_commands(click.Context(cli))
        error = run(words)
        assert isinstance(error, OlmError), (words, error)
        # reading where nothing is may be refused as such; what writes is a wrong command line
        assert error.exit_code in ((2,) if "--output" in words else (2, 4)), (words, error)
    assert (sorted(os.listdir("/")), sorted(os.listdir(here))) == before


@pytest.mark.parametrize("name", ["s3:/b/x.json", "GS:b/x.json", "file:x.json", "~/x.json"])
def test_a_file_is_not_written_to_a_folder_that_a_shell_or_a_typo_names(
    name: str, text: Path, here: Path
) -> None:
    with pytest.raises(UsageError, match=r"looks like a URL|left ~ as it is"):
        refuse_output(name, "--html", "file")
    with pytest.raises(UsageError, match=r"looks like a URL|left ~ as it is"):
        refuse_output(name, "--html", "local file")
    before = sorted(os.listdir(here))
    for words in (["train-tokenizer", str(text)], ["mix", "m.yaml"], ["import", "blend.txt"]):
        assert isinstance(run([*words, "--output", name]), OlmError)
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize("name", ["s3://b/x.json", "file:///b/x.json", "https://b/x.json"])
def test_a_file_of_this_machine_has_no_url(name: str, text: Path, here: Path) -> None:
    error = run(["train-tokenizer", str(text), "--vocab-size", "300", "--output", name])
    assert isinstance(error, UsageError)
    assert "this file is written on this machine" in error.what
    assert os.listdir(here) == [text.name]
    if name.startswith("https"):
        with pytest.raises(UsageError, match="can only be read"):
            refuse_output(name, "--output", "file")
    else:
        refuse_output(name, "--output", "file")


def test_the_home_folder_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in (str(tmp_path), f"{tmp_path}/work/..", str(tmp_path / "link")):
        with pytest.raises(UsageError, match="home folder"):
            refuse_output(name)
    refuse_output(str(tmp_path / "work"))
    for command in (["doctor", "--clean"], ["doctor"]):
        assert isinstance(run([*command, str(tmp_path)]), UsageError)


def test_the_output_is_not_in_a_folder_that_is_read(text: Path, project: Project) -> None:
    words = ["tokenize", str(project.folder), "--tokenizer", str(project.tokenizer), "--dry-run"]
    error = run([*words, "--output", str(project / "tokens")])
    assert isinstance(error, UsageError)
    assert "in a folder of the inputs" in str(error)
    assert run([*words, "--output", f"{project.folder}-tokens"]) is None


@pytest.mark.parametrize("name", ["", "  ", "folder/", "/"])
def test_a_file_to_write_has_a_name_and_is_no_folder(name: str) -> None:
    with pytest.raises(UsageError):
        refuse_output(name, "--output", "local file")


def test_gc_leaves_what_only_looks_like_ours(tmp_path: Path) -> None:
    for name in ("run/config.json", ".staging-area/x", ".olm-probe-mine", ".worker-notes/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    assert run(["doctor", str(tmp_path), "--clean", "--older-than", "0s"]) is None
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        ".olm-probe-mine",
        "config.json",
        "x",
        "x",
    ]


@pytest.mark.parametrize(
    "theirs",
    [
        *("run/results.csv", "quarantine/patients.txt", "versions/old.doc", "dedup/x"),
        *("validation/labels.csv", "validation/run/x", "tokenizer.json", "manifest.json"),
        *("plan.json", "job.json", "shard-00000.data", "shard-00000.tokens.npy/inside"),
        *("thesis.tex", ".git", "shard-0"),
    ],
)
def test_a_users_files_are_kept_whatever_their_names(
    theirs: str, text: Path, project: Project
) -> None:
    place = project / "mine" / theirs
    place.parent.mkdir(parents=True)
    place.write_text('{"format": "olm-checkpoint"}')
    words = [str(text), "--tokenizer", str(project.tokenizer), "-o", str(project / "mine")]
    for more in (["--dry-run"], ["--workers", "1"]):
        assert isinstance(run(["tokenize", *words, *more]), OlmError)
        left = [path for path in (project / "mine").rglob("*") if path.is_file()]
        assert left == [place]
        assert place.read_text() == '{"format": "olm-checkpoint"}'


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("~", "the shell left ~"),
        ("~/tokens", "the shell left ~"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("FILE:out", "file://out"),
        ("out\x1b[31m", "control characters"),
        ("out\n", "control characters"),
    ],
)
def test_what_a_shell_left_and_misspelt_urls_are_no_folders(place: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_output(place)
    assert part in str(caught.value)


@pytest.mark.parametrize("place", ["a.jsonl", "a.jsonl/sub", "gone", "user", "http://h/x", "."])
def test_a_dry_run_refuses_what_the_run_would(
    here: Path, place: str, text: Path, project: Project
) -> None:
    (project / "gone").symlink_to("nowhere")
    (project / "user").mkdir()
    (project / "user" / "thesis.doc").touch()
    words = ["tokenize", str(text), "--tokenizer", str(project.tokenizer), "-o", place]
    dry, real = run([*words, "--dry-run"]), run([*words, "--workers", "1"])
    assert isinstance(dry, OlmError)
    assert (type(dry), str(dry)) == (type(real), str(real))


def test_the_working_folder_is_an_output_only_if_it_is_empty(
    text: Path, monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    (project / "here").mkdir()
    monkeypatch.chdir(project.folder)
    with pytest.raises(UsageError):
        make_dataset([text], project.tokenizer, ".")
    monkeypatch.chdir(project / "here")
    done = make_dataset([text], project.tokenizer, ".")
    assert done.manifest.totals.documents == 5


def test_a_note_laid_into_a_dataset_later_is_no_reason_to_refuse_it(
    text: Path, project: Project
) -> None:
    project.make([text])
    (project.out / "README.md").write_text("what this is")
    assert project.make([text]).already_complete
    with pytest.raises(ConflictError):  # and another dataset is still another
        project.make([text], holdout="0.5")


def test_a_prefix_on_s3_with_other_objects_is_no_output(
    text: Path, tiny_tokenizer: Path, s3: dict[str, str]
) -> None:
    from support.s3 import client

    client(s3).put_object(Bucket=s3["bucket"], Key="d4/own/thesis.tex", Body=b"mine")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        make_dataset([text], tiny_tokenizer, f"s3://{s3['bucket']}/d4/own")
    make_dataset([text], tiny_tokenizer, f"s3://{s3['bucket']}/d4/own/tokens")
