"""olm-data doctor: what is printed, and the exit code."""

from __future__ import annotations

from support.command import Olm


def test_a_local_place_that_cannot_be_written_is_exit_5(olm: Olm) -> None:
    shown = olm("doctor", "/proc/x")
    assert shown.returncode == 5
    assert "write  fail " in shown.stdout
