"""Do something in another process and kill it at its n-th operation on the file system."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.distributed import PRELOADED

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link")


def killed_at(number: int, folder: Path, function: Callable[..., None], *arguments: Any) -> bool:
    """Call `function(*arguments)` in a process that gets SIGKILL before its n-th write operation.

    Operations are those below `folder` that change something: open for writing, rename, mkdir,
    remove; and every fsync. Returns whether the process was killed, and not finished before.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_child, args=(number, str(folder), function, arguments))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def _child(
    number: int, folder: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    count = 0

    def operation() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and _writes(args)):
            paths = [os.fsdecode(a) for a in args[:2] if isinstance(a, (str, bytes, os.PathLike))]
            if any(path.startswith(folder) for path in paths):
                operation()

    real_fsync = os.fsync

    def fsync(handle: int) -> None:
        operation()
        real_fsync(handle)

    os.fsync = fsync  # type: ignore[assignment]
    # Removal by directory handles shows relative names; by paths each step is an operation.
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    sys.addaudithook(audit)
    function(*arguments)


def _writes(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
