"""Commands in processes forked with the modules of a run: seconds less than in those started anew.

    forked(module, words) -> its exit code and what it said
    commands() -> a folder for a shell's PATH --> forked_client.py --> here

What a command imports, and when, is for tests that start Python (`core_only.py`).
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from operator import methodcaller
from pathlib import Path
from typing import Any

from support.distributed import rank_server

CLIENT = Path(__file__).with_name("forked_client.py")
_STARTING = threading.Lock()


def forked(
    module: str,
    *words: str | Path,
    environment: Mapping[str, str],
    folder: Path | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Do what `python -m module words` does; the result has returncode, stdout and stderr."""
    given = ["-m", module, *map(str, words)]
    with tempfile.TemporaryDirectory(prefix="forked-") as said:
        paths = [Path(said, "stdout"), Path(said, "stderr")]
        streams = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in paths]
        nothing = os.open(os.devnull, os.O_RDONLY)
        process = _start(given, environment, folder or Path.cwd(), [nothing, *streams])
        process.join(timeout)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(
            given, process.exitcode, *(path.read_text() for path in paths)
        )


@cache
def commands() -> Path:
    """A folder of `python`, `olm-data`, `olm-train` and `torchrun`, for as long as this process is.

    They run modules of the product, torchrun and scripts in forked processes, which have this
    `python` as `sys.executable`, and anything else in one started anew.
    """
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "server"))
    listening.listen()
    threading.Thread(target=_serve, args=(listening,), daemon=True).start()
    words = [sys.executable, "-IS", CLIENT, folder / "server", sys.executable]
    client = " ".join(shlex.quote(str(word)) for word in words)
    for name, module in (
        ("python", ""),
        ("olm-data", "-m olm_data.cli "),
        ("olm-train", "-m olm_train.cli "),
        ("torchrun", "-m torch.distributed.run "),
    ):
        (folder / name).write_text(f'#!/bin/sh\nexec {client} {module}"$@"\n')
        (folder / name).chmod(0o755)
    return folder


def python() -> str:
    """That of `commands`."""
    return str(commands() / "python")


def _serve(listening: socket.socket) -> None:
    while True:
        threading.Thread(target=_answer, args=listening.accept()[:1], daemon=True).start()


def _answer(client: socket.socket) -> None:
    """Start the client's command, hand it signals, kill it where the client is gone."""
    with client:
        head, streams, _, _ = socket.recv_fds(client, 8, 3)
        given = json.loads(client.recv(int.from_bytes(head), socket.MSG_WAITALL))
        process = _start(given["words"], given["environment"], given["folder"], streams)
        while process.exitcode is None:
            if client in wait([client, process.sentinel]):
                number = client.recv(1) or bytes([signal.SIGKILL])
                with suppress(ProcessLookupError):
                    os.kill(process.ident, number[0])  # type: ignore[arg-type]
        with suppress(BrokenPipeError):
            client.sendall(process.exitcode.to_bytes(2, signed=True))


class _Stream:
    """A descriptor of this process, and then of the one that it is sent to."""

    def __init__(self, here: int) -> None:
        self.here = here

    def __reduce__(self) -> Any:
        return methodcaller("detach"), (DupFd(self.here),)


def _start(
    words: Sequence[str], environment: Mapping[str, str], folder: Path | str, streams: Sequence[int]
) -> BaseProcess:
    """Start it with these standard streams, which are closed here."""
    there = [_Stream(stream) for stream in streams]
    with _STARTING, rank_server() as context:
        process = context.Process(
            target=_main, args=(python(), list(words), dict(environment), str(folder), there)
        )
        process.start()
    for stream in streams:
        os.close(stream)
    return process


def _main(
    python: str,
    words: list[str],
    environment: dict[str, str],
    folder: str,
    streams: Sequence[int],
) -> None:
    import torch

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put nothing there
    os.environ.clear()  # that of the time when the server was started
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.executable = python
    module = words[0] == "-m"
    sys.argv = words[module:]
    own = folder if module else str(Path(words[0]).absolute().parent)
    sys.path[:0] = [own, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(Path(words[0]).absolute()), run_name="__main__")
    finally:
        atexit._run_exitfuncs()
