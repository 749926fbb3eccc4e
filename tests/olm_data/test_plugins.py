"""What can be added by name: entry points of installed packages, ours and others'."""

from __future__ import annotations

import pytest

from olm_data import plugins
from olm_data.errors import UsageError


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
