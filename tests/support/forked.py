"""Commands in processes forked with the modules of a run: seconds less than in those started anew.

What a command imports, and when, is for tests that start Python (`core_only.py`).
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.distributed import rank_server


def forked(
    module: str,
    *words: str | Path,
    environment: Mapping[str, str],
    folder: Path | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Do what `python -m module words` does; the result has returncode, stdout and stderr."""
    given = [module, *map(str, words)]
    with tempfile.TemporaryDirectory(prefix="forked-") as said, rank_server() as context:
        streams = [Path(said, "stdout"), Path(said, "stderr")]
        process = context.Process(
            target=_main, args=(given, dict(environment), folder or Path.cwd(), streams)
        )
        process.start()
        process.join(timeout)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(
            given, process.exitcode, *(path.read_text() for path in streams)
        )


def _main(
    words: list[str], environment: dict[str, str], folder: Path, streams: Sequence[Path]
) -> None:
    import torch

    for number, path in zip((1, 2), streams, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()  # that of the time when the server was started
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
