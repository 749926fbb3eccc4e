"""`olm-train`: what a mistake in its arguments is answered with, and names that people give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.runs import build_trainer

from olm_data.command import run_program
from olm_data.errors import UsageError
from olm_data.redaction import redacted
from olm_train.cli import cli
from olm_train.extensions.generate.command import generate
from olm_train.extensions.generate.command import main as generate_command
from olm_train.run.command import main


def answered(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, list[str]]:
    monkeypatch.setattr(sys, "argv", ["olm-train", *words])
    with pytest.raises(SystemExit) as end:
        run_program(cli, "olm-train")
    return end.value.code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "says", "fix"),
    [
        (["generate", "run", "--chekpoint", "3"], "no such option", "olm-train generate --help"),
        (["generate", "run", "--top-k", "many"], "invalid value for", "olm-train generate --help"),
        (["evaluate", "run"], "missing option '--data'", "olm-train evaluate --help"),
        (["genrate"], "there is no command 'genrate'", "did you mean 'generate'?"),
        (["config", "--dry-run"], "--dry-run is for olm-train run", "leave it out"),
        (["config", "--seed"], "--seed has no value", "A field is set with --seed=value"),
        (["config", "--difff"], "unknown option --difff", "did you mean '--diff'?"),
    ],
)
def test_a_mistake_is_told_in_our_style_with_exit_code_2(
    words: list[str],
    says: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, lines = answered(words, monkeypatch, capsys)
    assert code == 2
    assert lines[0].startswith(f"error: {says}")
    assert lines[-1].startswith("  fix: ")
    assert fix in lines[-1]


def test_without_a_command_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = answered([], monkeypatch, capsys)
    assert code == 2
    assert any("lm-eval" in line for line in lines)


ESCAPES = "\x1b]0;x\x07\u202e\u2066\x9b31m"


def test_a_run_folders_name_with_escapes_acts_on_no_terminal(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a folder is not made; one in a folder that somebody else named is said in escapes."""
    with pytest.raises(UsageError, match="control characters"):
        build_trainer(tiny_mixture, tmp_path / f"run{ESCAPES}")
    folder = tmp_path / f"theirs{ESCAPES}"
    folder.mkdir()
    code = main([str(folder / "train.yaml")])
    said = capsys.readouterr().err
    assert code == 2
    assert not set(said) & set(ESCAPES) - set("]0;x31m")
    assert r"\x1b]0;x\x07\u202e" in said


@pytest.mark.parametrize("name", ["runs/{}", "{}", "/nowhere/x-{}/y"])
def test_a_save_folder_named_by_a_credential_is_refused(
    name: str, tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "canary-7q3vz9xk2wcanary"
    monkeypatch.setenv("TRACKER_API_KEY", secret)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="holds a credential") as error:
        build_trainer(tiny_mixture, Path(name.format(secret)))
    assert secret not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_credential_stays_one_where_a_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKER_API_KEY", "canary-7q3vz9xk2w")
    (tmp_path / "canary-7q3vz9xk2w").touch()
    assert redacted("key canary-7q3vz9xk2w") == "key ***"
    monkeypatch.setenv("TRACKER_API_KEY", str(tmp_path / "canary-7q3vz9xk2w"))
    assert redacted(f"read {tmp_path}/canary-7q3vz9xk2w").endswith("canary-7q3vz9xk2w")


def test_generate_refuses_what_is_no_text_and_no_number() -> None:
    with pytest.raises(UsageError):
        generate("nowhere", ["x\udcff"])
    wide = CliRunner().invoke(generate_command, ["nowhere", "--seed", "9" * 30])
    assert (wide.exit_code, "Traceback" in wide.output) == (2, False)
