"""What can be added by name, and optional packages: entry points, extras, and what to type."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
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
from olm_data.extras import DISTRIBUTION, EXTRAS, MissingExtra, missing_extra, needs
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


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_a_missing_package_of_an_extra_says_what_needs_it_and_what_to_type(
    package: str, extra: str
) -> None:
    with pytest.raises(MissingExtra) as caught, needs("this", where="--option"):
        raise ImportError(name=package)
    assert caught.value.what == f"this needs the package {package}, which is not installed"
    assert caught.value.where == "--option"
    assert caught.value.fix == f"pip install '{DISTRIBUTION}[{extra}]'"


def test_another_failed_import_is_left_as_it_is() -> None:
    error = ImportError("no", name="somebody_elses")
    with pytest.raises(ImportError) as caught, needs("this"):
        raise error
    assert caught.value is error


def test_what_is_explained_already_is_not_explained_again() -> None:
    explained = missing_extra(ImportError(name="ray"))
    assert missing_extra(explained) is explained


def test_a_name_of_the_library_says_which_extra_brings_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    from olm_train import Trainer\n"
        "except ImportError as error:\n    print(error.fix)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"pip install '{DISTRIBUTION}[train]'\n", done.stderr
