"""Local folders for what is on its way to a remote store: each is locked while its writer lives.

    scratch() -> TMPDIR/olm-staging-HOST-PID-xxxxxxxx/ with a locked file `.lock`
    abandoned() -> those of this machine whose lock is free: their writer was killed

The kernel drops the lock with the process, so a folder is never taken from a living writer,
whatever its age or process number. Never: a folder of another machine or another user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"
_PREFIX = "olm-staging-"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new local folder; it is removed at the end, whatever happens."""
    folder, handle = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def abandoned(*, remove: bool = False) -> list[Path]:
    """Return this user's folders on this machine whose writers are dead.

    Args:
        remove: delete each of them, too, while its lock is held.
    """
    found = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}{_host()}-*")):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            handle = os.open(folder / LOCK, os.O_RDWR)
        except FileNotFoundError:  # just made, or just removed
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(folder)
            if remove:
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)
    return found


def _locked_folder() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_host()}-{os.getpid()}-"))
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if (folder / LOCK).exists():
            return folder, handle
        os.close(handle)  # `abandoned` came between the open and the lock


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
