"""What a tracker is told holds no credential, and a plain one takes rows in their order alone."""

from __future__ import annotations

from typing import ClassVar

from olm_data.extensions.watching.follow import LoggedStep
from olm_train.extensions.tracking.base import Ending, Tracker, without_secrets

SECRET = "abcdefgh12345678ijklmnop"


class Plain(Tracker):
    name: ClassVar[str] = "plain"

    def open(self, key: str | None, logged: int) -> str:
        return "k"

    def truncate(self, step: int) -> int:
        return step

    def log(self, steps: list[LoggedStep]) -> None:
        raise AssertionError("it was not asked to")

    def close(self, ending: Ending) -> None: ...


def test_a_tracker_that_says_nothing_else_takes_no_row_of_an_earlier_step() -> None:
    tracker = Plain()
    assert not tracker.any_order
    tracker.alert("a", "b", "info")
    assert tracker.cancelled() is None


def test_no_text_of_a_configuration_holds_a_credential() -> None:
    config = {f"s3://key:{SECRET}@host/a": [f"https://u:{SECRET}@host/b", ("x", 3)], "n": None}
    shown = without_secrets(config)
    assert SECRET not in str(shown)
    assert shown["n"] is None
    assert next(iter(shown.values()))[1] == ["x", 3]
