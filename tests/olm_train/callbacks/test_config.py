"""The section of callbacks: one of each, under one name."""

from __future__ import annotations

import pytest

from olm_data.errors import UsageError
from olm_train.callbacks.config import CallbacksConfig
from olm_train.callbacks.notifier import NotifierCallback


def test_a_callback_of_two_names_is_given_once() -> None:
    with pytest.raises(UsageError, match="two names of one callback"):
        CallbacksConfig(notifier=NotifierCallback(), slack_notifier=NotifierCallback())


def test_each_run_gets_callbacks_of_its_own() -> None:
    config = CallbacksConfig(notifier=NotifierCallback())
    first, second = config.build(), config.build()
    assert first["notifier"] == second["notifier"]
    assert all(first[name] is not second[name] for name in first)
