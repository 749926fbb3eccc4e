"""Runs `olm-data` as a user does: a process of its own, in a folder, with an environment."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.forked import forked

HOOKS: list[tuple[Any, str]] = [
    (sys, "excepthook"),
    (sys, "unraisablehook"),
    (threading, "excepthook"),
    (warnings, "formatwarning"),
]
"""What a command replaces in its process; see olm_data.sinks."""

REPOSITORY = Path(__file__).resolve().parents[2]
WITH_TESTS = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
"""For `environment`, where a program imports `support`."""


def arguments(*words: str | Path) -> list[str]:
    """Return the command line of `olm-data` with these words."""
    return [sys.executable, "-m", "olm_data.cli", *map(str, words)]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, the checkout importable, and `extra`."""
    return os.environ | {"PYTHONPATH": str(REPOSITORY)} | dict(extra or {})


@dataclass(frozen=True)
class Said:
    """What a command said, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def inside(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Said:
    """Run `olm-data` in this process, from its entry point on: a second faster than a new one."""
    from olm_data.cli import main

    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["olm-data", *map(str, words)])
        for module, name in HOOKS:
            patch.setattr(module, name, getattr(module, name))
        records = logging.getLogRecordFactory()
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            logging.setLogRecordFactory(records)
    shown = capsys.readouterr()
    return Said(int(ended.value.code or 0), shown.out, shown.err)


Olm = Callable[..., Said]
"""What the fixture `olm` is: `inside`, for the words of a command line."""


def olm_data(
    *words: str | Path, folder: Path | None = None, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `olm-data` to its end; the result has returncode, stdout and stderr."""
    return forked("olm_data.cli", *words, environment=environment(extra), folder=folder)


def program(
    *words: str | Path, extra: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python on these words to its end, in a process that can import `support`."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment(WITH_TESTS | dict(extra or {})),
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def python(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a process of its own, which can import from its folder."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, str(file)],
        env=environment({"PYTHONPATH": f"{environment()['PYTHONPATH']}:{tmp_path}"}),
        capture_output=True,
        text=True,
        check=False,
    )
