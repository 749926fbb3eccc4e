"""Row U9: every command takes -o, -q, -v; mistakes get one style and the nearest name."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from support.command import inside
from support.tokenizing import texts, write_jsonl

from olm_data.cli import HIDDEN, SUMMARIES, cli
from olm_data.errors import UsageError
from olm_train.run.command import Arguments


@pytest.mark.parametrize("name", SUMMARIES)
def test_u9_every_command_takes_the_common_options(name: str) -> None:
    context = click.Context(cli)
    command = cli.get_command(context, name)
    assert cli.get_command(context, name) is command
    assert command is not None
    names = [option for parameter in command.params for option in parameter.opts]
    assert len(names) == len(set(names)), names
    assert {"-q", "--quiet", "-v", "--verbose", "--debug"} <= set(names)
    assert ("-o" in names) == ("--output" in names)


def test_u9_help_names_each_command_with_a_whole_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = inside(capsys, "--help").stdout
    for name, summary in SUMMARIES.items():
        assert (f"  {name} " in text) == (name not in HIDDEN)
        assert name in HIDDEN or summary in " ".join(text.split())
        assert summary.endswith(".")


@pytest.fixture
def words(tmp_path: Path, tiny_tokenizer: Path) -> list[str | Path]:
    source = write_jsonl(tmp_path / "a.jsonl", texts(9))
    return ["tokenize", source, "--tokenizer", tiny_tokenizer, "-o", tmp_path / "out"]


def test_u9_quiet_says_the_result_alone_and_verbose_what_was_done(
    words: list[str | Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = inside(capsys, *words, "-q")
    assert quiet.returncode == 0, quiet.stderr
    assert quiet.stderr == ""
    assert quiet.stdout.startswith("made ")
    loud = inside(capsys, "verify", tmp_path / "out", "-v")
    assert f"read {tmp_path}/out/manifest.json" in loud.stderr
    last = loud.stderr.splitlines()[-1]
    assert last.startswith("took ")
    assert " s of CPU, " in last
    silent = inside(capsys, "verify", tmp_path / "out")
    assert "manifest.json" not in silent.stderr


def test_u9_quiet_still_tells_warnings_and_errors(
    words: list[str | Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "error: " in inside(capsys, *words, "--eos", "nothing", "-q").stderr
    both = inside(capsys, *words, "-q", "-v")
    assert (both.returncode, "-q and -v contradict each other" in both.stderr) == (2, True)


@pytest.mark.parametrize(
    ("typed", "error", "fix"),
    [
        (["tokenise", "x"], "there is no command 'tokenise'", "did you mean 'tokenize'?"),
        (["mixx"], "there is no command 'mixx'", "did you mean 'mix'?"),
        (["verify", "--smaple", "1%"], "no such option '--smaple'", "olm-data verify --help"),
        (["verify"], "missing argument", "olm-data verify --help"),
        (["report", "a", "--run"], "requires an argument", "olm-data report --help"),
        (["--versoin"], "no such option '--versoin'", "olm-data --help"),
    ],
)
def test_u9_a_mistyped_command_line_has_one_style_and_a_way_out(
    typed: list[str], error: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = inside(capsys, *typed)
    assert said.returncode == 2
    assert said.stderr.startswith("error: ")
    first, second = said.stderr.splitlines()[:2]
    assert error in first
    assert second.startswith("  fix: ")
    assert fix in second
    assert "Usage:" not in said.stderr


def test_u9_a_mistyped_command_is_an_event_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    event = json.loads(inside(capsys, "tokenise", "x", "--json").stdout.splitlines()[-1])
    assert (event["event"], event["exit_code"]) == ("error", 2)


def test_u9_a_field_of_training_takes_its_value_as_the_next_word() -> None:
    given = Arguments.split(["a.yaml", "--train_module.optim.lr", "3e-4", "--seed", "7", "--debug"])
    assert given.overrides == ["--train_module.optim.lr=3e-4", "--seed=7"]
    assert (given.config, given.flags) == ("a.yaml", {"--debug"})


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--dry-rnu", "a.yaml"], "did you mean '--dry-run'?"),
        (["--trainer.save_folder"], "--trainer.save_folder has no value"),
        (["--trainer.save_folder", "--debug"], "--trainer.save_folder has no value"),
        (["-x", "a.yaml"], "unknown option -x"),
    ],
)
def test_u9_an_option_of_training_without_a_value_is_refused(typed: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Arguments.split(typed)
    assert says in str(caught.value)
