"""A lock file that the kernel frees with its process, for folders of one machine.

    open -> flock -> still the file at that name? -> held, until the block ends or the process dies

Some file systems grant every lock and keep nobody apart. So this is no proof of being alone: what
must not be shared lies under a name of its own, and `process.state_of` says whose process is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


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
