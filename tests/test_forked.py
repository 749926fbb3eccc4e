"""Forked commands end as those that are started, with their codes, signals and streams."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.forked import commands, python
from support.polling import wait_until

SAYS = "import os, sys; print(os.getpid(), *sys.argv[1:], flush=True); "


def start(folder: Path, program: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A script that says its process and words; what it said."""
    (folder / "script.py").write_text(SAYS + program)
    words = [python(), "script.py", "a b"]
    process = subprocess.Popen(
        words, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split(maxsplit=1)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("sys.exit(75)", 75),
        ("sys.exit(len(sys.stdin.read()))", 3),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_words_streams_and_codes_are_those_of_the_command(
    tmp_path: Path, program: str, code: int
) -> None:
    process, (own, words) = start(tmp_path, program)
    process.communicate("abc", timeout=600)
    assert process.returncode == code
    assert int(own) != process.pid
    assert words == "a b\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_ends_the_command_ends_what_was_forked(tmp_path: Path, number: signal.Signals) -> None:
    process, (own, _) = start(tmp_path, "import signal; signal.pause()")
    process.send_signal(number)
    process.communicate(timeout=600)
    assert process.returncode == -number
    wait_until(lambda: not Path("/proc", own).exists(), "it has ended")


def test_another_program_is_python_itself() -> None:
    words = [commands() / "python", "-c", "import os; print(os.getpid())"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert int(process.stdout.read()) == process.pid
