"""The local disk: durable writes, a lock that dies with its holder, and errors that say what to do.

    bytes -> write -> fsync(file) -> (rename | link by the caller) -> fsync(folder)
    OSError -> io_errors -> ResourceError with the place, the room left and the next step

Never: a name before its bytes, a lock that outlives its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from olm_data.errors import ConflictError, OlmError, ResourceError


@contextlib.contextmanager
def io_errors(where: str, *, writing: bool = False) -> Iterator[None]:
    """Turn errors of the local disk into errors that say where and what to do.

    A missing file stays FileNotFoundError when reading; when writing, a missing folder is an error
    for the user.
    """
    try:
        yield
    except (OlmError, FileExistsError):
        raise
    except FileNotFoundError as error:
        if not writing:
            raise
        raise ResourceError(
            "the folder to write to does not exist",
            where=where,
            fix="create it first, or choose another output",
        ) from error
    except OSError as error:
        raise _translated(error, where) from error


def _translated(error: OSError, where: str) -> OlmError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = None
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(existing_parent(where)).free
        room = "" if free is None else f"; {free:,} bytes are free there"
        return ResourceError(
            f"no space left to write{room}",
            where=where,
            fix="make room, then run the same command again; finished work is kept",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ResourceError(
            f"not allowed: {error.strerror}",
            where=where,
            fix="choose a folder you may write to, or change its permissions",
        )
    return ResourceError(
        f"input/output error: {error.strerror or error}",
        where=where,
        fix="run the same command again; finished work is kept",
    )


def existing_parent(path: str) -> Path:
    """Return the nearest folder above a path (or itself) that exists."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return place


def make_folder(path: str) -> None:
    """Make a folder and its parents; a file in the way is an error for the user."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ResourceError(
            "a file is in the way of the folder to write to",
            where=path,
            fix="choose another output, or move the file",
        ) from error


def write_durable(path: Path, data: bytes) -> None:
    """Write a file and wait until its bytes are on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Wait until the names of a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sizes_in_folder(folder: str, prefix: str) -> dict[str, int]:
    """Return the sizes of the files right in a folder whose names start with `prefix`."""
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                    found[entry.name] = entry.stat().st_size
    return found


def lock_file(path: str) -> int:
    """Return an open handle of a new file that this process alone holds locked.

    Raises:
        ConflictError: another process holds it.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise ConflictError(
                "another process is writing this output",
                where=os.path.dirname(path),
                fix="wait for it to finish, or choose another --output",
            ) from error
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)  # the former holder removed the file between our open and our lock
