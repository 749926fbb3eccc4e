"""Every command takes -o, -q and -v, and says no more than it was asked for."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from support.command import inside
from support.tokenizing import texts, write_jsonl

from olm_data.cli import SUMMARIES, cli


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_command_takes_the_common_options(name: str) -> None:
    context = click.Context(cli)
    command = cli.get_command(context, name)
    assert cli.get_command(context, name) is command
    assert command is not None
    names = [option for parameter in command.params for option in parameter.opts]
    assert len(names) == len(set(names)), names
    assert {"-q", "--quiet", "-v", "--verbose", "--debug"} <= set(names)
    assert ("-o" in names) == ("--output" in names)


@pytest.fixture
def words(tmp_path: Path, tiny_tokenizer: Path) -> list[str | Path]:
    source = write_jsonl(tmp_path / "a.jsonl", texts(9))
    return ["tokenize", source, "--tokenizer", tiny_tokenizer, "-o", tmp_path / "out"]


def test_quiet_says_the_result_alone_and_verbose_what_was_done(
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


def test_quiet_still_tells_warnings_and_errors(
    words: list[str | Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "error: " in inside(capsys, *words, "--eos", "nothing", "-q").stderr
    both = inside(capsys, *words, "-q", "-v")
    assert (both.returncode, "-q and -v contradict each other" in both.stderr) == (2, True)
