"""What can be added by name: entry points of installed packages, ours and others'."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from olm_data import plugins
from olm_data.cli import cli
from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.callbacks.config import CallbacksConfig


def test_entry_points_of_installed_packages_are_found() -> None:
    assert "pytest" in plugins.names("console_scripts")
    assert plugins.path_of("console_scripts", "pytest") in (
        "pytest:console_main",
        "_pytest.config:_console_main",
    )
    assert plugins.path_of("console_scripts", "no-such-command") is None


def test_our_own_come_first_and_are_loaded_by_name() -> None:
    ours = list(plugins.ours("olm_train.commands"))
    assert plugins.names("olm_train.commands")[: len(ours)] == ours
    assert plugins.load("olm_data.services", "gs").__name__ == "Google"


def test_an_extension_that_is_not_installed_is_named() -> None:
    with pytest.raises(UsageError, match="no installed package brings 'ftp'"):
        plugins.load("olm_data.services", "ftp")


def test_a_package_brings_a_command_and_a_callback_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab.py").write_text(
        "from dataclasses import dataclass\n\nimport click\n\nfrom olm_train import Callback\n\n\n"
        "@click.command()\ndef hello():\n    click.echo('hello')\n\n\n"
        "@dataclass(kw_only=True)\nclass Bell(Callback):\n    rings: int = 1\n"
    )
    about = tmp_path / "lab-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[olm_data.commands]\nhello = lab:hello\n[olm_train.callbacks]\nbell = lab:Bell\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = CliRunner().invoke(cli, ["hello"])
    assert (said.exit_code, said.output) == (0, "hello\n")
    assert "hello" in CliRunner().invoke(cli, ["--help"]).output
    values = Values({"bell": {"rings": 3}}, file="train.yaml", imports=True)
    (bell,) = parse(CallbacksConfig, values).own.values()
    assert (type(bell).__name__, vars(bell)["rings"]) == ("Bell", 3)
