"""The most memory that this process had: for programs that tests run."""

from __future__ import annotations

from pathlib import Path


def peak() -> int:
    """Return KiB, of this process since it began with its program.

    `ru_maxrss` begins with the peak of whoever started it: with pytest's gigabytes nothing seems to
    grow.
    """
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def forget_peak() -> None:
    """Let the peak begin anew with what is used now."""
    Path("/proc/self/clear_refs").write_text("5")
