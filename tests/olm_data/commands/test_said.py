"""Every command takes -o, -q and -v, and says no more than it was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.command import Olm
from support.tokenizing import texts, write_jsonl

from olm_data.cli import cli
from olm_data.command import CountParam
from olm_train.cli import cli as trainer

BOTH = [(cli, name) for name in cli.list_commands(click.Context(cli))]
BOTH += [
    (trainer, name)
    for name in trainer.list_commands(click.Context(trainer))
    if name not in ("run", "config", "lm-eval")
]


@pytest.mark.parametrize(("group", "name"), BOTH)
def test_every_command_takes_the_common_options(group: click.Group, name: str) -> None:
    context = click.Context(group)
    command = group.get_command(context, name)
    assert group.get_command(context, name) is command
    names = [option for parameter in command.params for option in parameter.opts]
    assert len(names) == len(set(names)), names
    assert {"-q", "--quiet", "-v", "--verbose", "--debug"} <= set(names)
    assert ("-o" in names) == ("--output" in names)


@pytest.fixture
def words(tmp_path: Path, tiny_tokenizer: Path) -> list[str | Path]:
    source = write_jsonl(tmp_path / "a.jsonl", texts(9))
    return ["tokenize", source, "--tokenizer", tiny_tokenizer, "-o", tmp_path / "out"]


def test_quiet_says_the_result_alone_and_verbose_what_was_done(
    words: list[str | Path], tmp_path: Path, olm: Olm
) -> None:
    quiet = olm(*words, "-q")
    assert quiet.returncode == 0, quiet.stderr
    assert quiet.stderr == ""
    assert quiet.stdout.startswith("output ")
    loud = olm("verify", tmp_path / "out", "-v")
    assert f"read {tmp_path}/out/manifest.json" in loud.stderr
    last = loud.stderr.splitlines()[-1]
    assert last.startswith("took ")
    assert " s of CPU, " in last
    silent = olm("verify", tmp_path / "out")
    assert "manifest.json" not in silent.stderr


def test_quiet_still_tells_warnings_and_errors(words: list[str | Path], olm: Olm) -> None:
    assert "error: " in olm(*words, "--eos", "nothing", "-q").stderr
    both = olm(*words, "-q", "-v")
    assert (both.returncode, "-q and -v contradict each other" in both.stderr) == (2, True)


def test_quiet_prints_no_table(tiny_mixture: Path, tmp_path: Path, olm: Olm) -> None:
    manifest = next(tiny_mixture.parent.glob("*.yaml"), None)
    if manifest is None:
        manifest = tiny_mixture.parent / "quiet.yaml"
        stage = "{name: main, tokens: 1K, weights: {prose: 1}}"
        source = "{data: ./prose, max_epochs: 9}"
        lines = ["version: 1", "seed: 1", "sequence_length: 32", f"sources: {{prose: {source}}}"]
        manifest.write_text("\n".join([*lines, f"stages: [{stage}]", ""]))
    done = olm("mix", manifest, "-o", tmp_path / "quiet.lock.json", "-q")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"written: {tmp_path}/quiet.lock.json (digest ")


@pytest.mark.parametrize(
    ("text", "number"), [("32K", 32_000), ("32768", 32_768), ("1.5m", 1_500_000)]
)
def test_counts_are_taken_as_people_write_them(text: str, number: int) -> None:
    command = click.Command("x", params=[click.Option(["--most"], type=CountParam(1))])
    assert command.make_context("x", ["--most", text]).params == {"most": number}
    with pytest.raises(click.BadParameter, match="'lots' is not a valid integer"):
        command.make_context("x", ["--most", "lots"])


@pytest.mark.parametrize("package", ["olm_data", "olm_train"])
def test_a_package_runs_as_its_program(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(package.replace("_", "-"))
