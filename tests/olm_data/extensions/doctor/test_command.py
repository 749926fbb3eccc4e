"""olm-data doctor: what is printed, and the exit code."""

from __future__ import annotations

from support.command import olm_data


def test_a_local_place_that_cannot_be_written_is_exit_5() -> None:
    shown = olm_data("doctor", "/proc/x")
    assert shown.returncode == 5
    assert "write  fail " in shown.stdout
