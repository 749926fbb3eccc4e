"""The section of callbacks."""

from __future__ import annotations

from olm_train.callbacks.config import CallbacksConfig
from olm_train.extensions.notices.notifier import NotifierCallback


def test_each_run_gets_callbacks_of_its_own() -> None:
    config = CallbacksConfig(own={"notifier": NotifierCallback()})
    first, second = config.build(), config.build()
    assert first["notifier"] == second["notifier"]
    assert all(first[name] is not second[name] for name in first)
