"""What a command costs beside its work: how it starts its workers, and how it ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.command import environment


def python(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a process of its own."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, str(file)],
        env=environment({"PYTHONPATH": f"{environment()['PYTHONPATH']}:{tmp_path}"}),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("code", [None, 0, 3, "words"])
def test_d9_a_command_ends_after_all_exit_functions_and_before_its_modules_are_taken_apart(
    tmp_path: Path, code: object
) -> None:
    done = python(
        tmp_path,
        f"""
        import atexit, sys, threading, time
        from olm_data import cli

        class Torn:
            def __del__(self):
                print("torn apart", file=sys.stderr)

        torn = Torn()
        torn.itself = torn

        def command():
            atexit.register(print, "exit function", end="")  # stays in the buffer
            threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
            raise SystemExit({code!r})

        cli.main = command
        cli.entry()
        """,
    )
    assert done.returncode == {None: 0, 0: 0, 3: 3, "words": 1}[code]
    assert done.stdout == "thread\nexit function"
    assert done.stderr == ("words\n" if code == "words" else "")


def test_d9_a_defect_still_ends_by_its_traceback_and_exit_code_1(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        """
        from olm_data import cli

        def command():
            raise RuntimeError("defect")

        cli.main = command
        cli.entry()
        """,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: defect\n")


def test_d9_the_fork_server_ends_with_its_parent_without_taking_its_modules_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "heavy.py").write_text(
        "import os\n"
        "class Torn:\n"
        "    def __del__(self, write=os.write):\n"
        "        write(2, b'torn apart')\n"
        "os.write(2, b'loaded ')\n"
        "torn = Torn()\n"
    )
    done = python(
        tmp_path,
        """
        from olm_data.runners import fork_server

        if __name__ == "__main__":
            fork_server.start(["heavy"])
        """,
    )
    assert (done.returncode, done.stderr) == (0, "loaded ")  # stderr is open as long as the server


def test_d9_the_fork_server_is_started_before_the_large_libraries_are_imported(
    tmp_path: Path,
) -> None:
    done = python(
        tmp_path,
        """
        import sys
        from olm_data.runners import fork_server

        def start(modules):
            large = {"numpy", "pyarrow", "tokenizers", "fsspec", "awkward"}
            print("large:", *sorted(large & set(sys.modules)))
            raise SystemExit(9)

        fork_server.start = start
        sys.argv = ["olm-data", "tokenize", "a.jsonl", "--tokenizer", "gpt2", "--output", "out"]
        from olm_data.cli import main
        main()
        """,
    )
    assert (done.returncode, done.stdout) == (9, "large:\n")
