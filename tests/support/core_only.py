"""Runs commands one after another as in an installation without extras: their packages are hidden.

    python core_only.py [--hide] < JSON: [[module, argument, ...], ...] > JSON: [[code, said], ...]

Without --hide the interpreter is one that really lacks them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import json
import runpy
import sys
import traceback
from typing import Any


def hide(packages: set[str]) -> None:
    """Make imports fail as they do where a package is not installed."""
    finder: Any = importlib.machinery.PathFinder
    found = finder.find_spec

    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in packages else found(name, path, target)

    finder.find_spec = find_spec


def run(command: list[str]) -> tuple[int, str]:
    """Run a module as a command; return its exit code and all it said."""
    said, sys.argv = io.StringIO(), command
    code = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            code = 1
            traceback.print_exc(file=said)
    return code, said.getvalue()


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, which has modules named like packages
    if "--hide" in sys.argv:
        from olm_data.extras import EXTRAS

        hide(set(EXTRAS))
    commands = json.load(sys.stdin)
    importlib.invalidate_caches()
    json.dump([run(command) for command in commands], sys.stdout)
