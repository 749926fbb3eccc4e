"""What a command costs beside its work: how it starts its workers, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import python


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
