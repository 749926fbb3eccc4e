"""How a command ends: its exit code, what it says of an error, what is done before it is gone."""

from __future__ import annotations

import errno
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from support.command import python

from olm_data.command import Command


@pytest.mark.parametrize("code", [None, 0, 3, "words"])
def test_a_command_ends_after_all_exit_functions_and_before_its_modules_are_taken_apart(
    tmp_path: Path, code: object
) -> None:
    done = python(
        tmp_path,
        f"""
        import atexit, sys, threading, time
        from olm_data.command import run_process

        class Torn:
            def __del__(self):
                print("torn apart", file=sys.stderr)

        torn = Torn()
        torn.itself = torn

        def command():
            atexit.register(print, "exit function", end="")  # stays in the buffer
            threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
            raise SystemExit({code!r})

        run_process(command)
        """,
    )
    assert done.returncode == {None: 0, 0: 0, 3: 3, "words": 1}[code]
    assert done.stdout == "thread\nexit function"
    assert done.stderr == ("words\n" if code == "words" else "")


def test_a_defect_still_ends_by_its_traceback_and_exit_code_1(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        """
        from olm_data.command import run_process

        def command():
            raise RuntimeError("defect")

        run_process(command)
        """,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: defect\n")


@click.command(cls=Command)
def fill() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/runs/first")


def test_an_error_of_the_machine_is_a_message_and_its_traceback_is_for_debug() -> None:
    done = CliRunner().invoke(fill)
    assert done.exit_code == 5
    assert done.stderr.startswith("error: no space left to write")
    assert "/runs/first" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in CliRunner().invoke(fill, ["--debug"]).stderr
