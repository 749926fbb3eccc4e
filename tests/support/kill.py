"""Do something in another process and kill it at its n-th operation on the file system."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.distributed import rank_server

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link")


def killed_at_each_operation(
    template: Path, workplace: Path, function: Callable[..., None], *arguments: Any
) -> list[Path]:
    """Call `function(*arguments, folder)` on copies of `template`, killed at operation 1, 2, ...

    Each call is in a process of its own, which gets SIGKILL before its n-th operation, until one
    finishes before that. Operations are those below the copy that change something (open for
    writing, rename, mkdir, remove) and every fsync.

    Returns:
        The copies, the last one untouched by a kill.
    """
    with rank_server() as context:
        process = context.Process(target=_loop, args=(template, workplace, function, arguments))
        process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode
    return sorted(workplace.glob("kill-*"))


def _loop(
    template: Path, workplace: Path, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Fork a child for each number; this process has one thread, so forking it is safe.

    It calls the function once itself, so that the children need not import and set up anything.
    """
    torch.set_num_threads(1)
    shutil.copytree(template, workplace / "warm-up")
    function(*arguments, workplace / "warm-up")
    status = -1
    for number in itertools.count(1):
        folder = workplace / f"kill-{number:04d}"
        shutil.copytree(template, folder)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _child(number, str(folder), function, (*arguments, folder))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), status
        if status == 0:
            return


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
