"""The section of callbacks: one of each, under one name."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import config_values

from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.callbacks.base import Callback
from olm_train.callbacks.config import CallbacksConfig
from olm_train.callbacks.notifier import NotifierCallback
from olm_train.run.config import RunConfig


def test_a_callback_of_two_names_is_given_once() -> None:
    with pytest.raises(UsageError, match="two names of one callback"):
        CallbacksConfig(notifier=NotifierCallback(), slack_notifier=NotifierCallback())


def test_each_run_gets_callbacks_of_its_own() -> None:
    config = CallbacksConfig(notifier=NotifierCallback())
    first, second = config.build(), config.build()
    assert first["notifier"] == second["notifier"]
    assert all(first[name] is not second[name] for name in first)


class Undecorated(Callback):
    """Lacks the decorator; a frozen one would be refused by Python, as `Callback` is not frozen."""


def test_a_callback_that_is_no_dataclass_is_told_the_decorator_that_works(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    values = Values(config_values(tiny_mixture, tmp_path))
    values.override(f"--trainer.callbacks.mine={{name: '{__name__}:Undecorated'}}")
    with pytest.raises(UsageError, match=r"@dataclass\(kw_only=True\)"):
        RunConfig.resolve(values)
