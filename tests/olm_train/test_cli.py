"""`olm-train`: what a mistake in its arguments is answered with."""

from __future__ import annotations

import sys

import pytest

from olm_data.command import run_program
from olm_train.cli import cli


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
