"""Local folders for unfinished work: each is locked while its writer lives.

    scratch()       -> TMPDIR/olm-staging-HOST-PID-xxxxxxxx/ with a locked file `.lock`
    scratch(folder) -> FOLDER/.olm-staging-HOST-PID-xxxxxxxx/, for files to be renamed into FOLDER
    abandoned(...)  -> those of this machine whose lock is free and whose writer is not alive

The lock file names its process: where locks do nothing, that keeps a folder from being taken from a
living writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from olm_data.storage.process import Process, State, state_of, this_process


@contextlib.contextmanager
def locked(
    path: Path, *, wait: bool = True, create: bool = True, remove: bool = True
) -> Iterator[int | None]:
    """Hold a lock file; yield its handle, or None where another holds it and `wait` is not set.

    Args:
        path: of the file.
        wait: until it is free.
        create: make the file if it is not there.
        remove: it, at the end.

    Raises:
        FileNotFoundError: its folder, or without `create` the file, is not there.
    """
    while True:
        handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            yield None
            return
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                break
        os.close(handle)  # the former holder removed the file between our open and our lock
    try:
        yield handle
    finally:
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        os.close(handle)


LOCK = ".lock"
_PREFIX = "olm-staging-"
BESIDE = f".{_PREFIX}"
"""Start of the names of those that are not in the temporary folder."""
_JUST_MADE = 60.0  # seconds; by one machine's own clock


@contextlib.contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new local folder; it is removed at the end, whatever happens.

    Args:
        parent: an existing folder to make it in; by default the temporary folder.
    """
    with contextlib.ExitStack() as held:
        folder = _locked_folder(parent, held)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def abandoned(parent: Path | None = None, *, remove: bool = False) -> list[Path]:
    """Return this user's folders on this machine whose writers are dead.

    Args:
        parent: as for `scratch`.
        remove: delete each of them, too, while its lock is held.
    """
    found = []
    for folder in sorted((parent or Path(tempfile.gettempdir())).glob(f"{_prefix(parent)}*")):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with locked(folder / LOCK, wait=False, create=False, remove=False) as handle:
                if handle is None or _alive(handle):
                    continue
                found.append(folder)
                if remove:
                    shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:  # just made, or just removed
            continue
    return found


def _locked_folder(parent: Path | None, held: contextlib.ExitStack) -> Path:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_prefix(parent)}{os.getpid()}-", dir=parent))
        with contextlib.suppress(FileNotFoundError):  # `abandoned` came before the lock
            handle = held.enter_context(locked(folder / LOCK, remove=False))
            assert handle is not None
            os.write(handle, " ".join(map(str, this_process())).encode())
            return folder


def _alive(handle: int) -> bool:
    """Whether the process that a lock file names lives, or has only just made the file."""
    fields = os.pread(handle, 1024, 0).decode(errors="replace").rsplit(" ", 3)
    if len(fields) != 4 or not (fields[2].isdecimal() and fields[3].isdecimal()):
        return time.time() - os.fstat(handle).st_mtime < _JUST_MADE
    process = Process(fields[0], fields[1], int(fields[2]), int(fields[3]))
    return state_of(process) in (State.running, State.stopped)


def _prefix(parent: Path | None) -> str:
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:24]  # sockets' paths are short
    return f"{_PREFIX if parent is None else BESIDE}{host}-"
