"""What all tests of olm_train share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


def watchdogs() -> set[int | None]:
    """Return the threads of this process that watch a run."""
    return {each.ident for each in threading.enumerate() if each.name == "olm-watchdog"}


@pytest.fixture(autouse=True)
def _no_watchdog_is_left() -> Iterator[None]:
    """One that outlives its run would end the process that runs the tests."""
    before = watchdogs()
    yield
    assert watchdogs() <= before
