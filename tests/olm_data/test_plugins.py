"""What can be added by name: entry points of installed packages, ours and others'."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.installed import install

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
    groups = {"olm_data.commands": {"hello": "lab:hello"}}
    install(tmp_path, "lab", groups | {"olm_train.callbacks": {"bell": "lab:Bell"}})
    monkeypatch.syspath_prepend(tmp_path)
    said = CliRunner().invoke(cli, ["hello"])
    assert (said.exit_code, said.output) == (0, "hello\n")
    assert "hello" in CliRunner().invoke(cli, ["--help"]).output
    values = Values({"bell": {"rings": 3}}, file="train.yaml", imports=True)
    (bell,) = parse(CallbacksConfig, values).own.values()
    assert (type(bell).__name__, vars(bell)["rings"]) == ("Bell", 3)


def test_packages_are_looked_through_once_for_each_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    asked = []
    found = importlib.metadata.entry_points

    def counted(**given: str) -> EntryPoints:
        asked.append(given)
        return found(**given)

    monkeypatch.setattr(importlib.metadata, "entry_points", counted)
    for _ in range(3):
        assert plugins.path_of("olm_data.formats", "none-has-this") is None
    assert asked == [{"group": "olm_data.formats"}]
