"""The local disk: durable writes, and errors that say what to do.

bytes -> write -> fsync(file) -> (rename | link by the caller) -> fsync(folder)
OSError -> io_errors -> ResourceError with the place, the room left and the next step

Also: A lock file that the kernel frees with its process, for folders of one machine.

Also: local folders for unfinished work: each is locked while its writer lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from olm_data.errors import InputError, OlmError, ResourceError, printable
from olm_data.storage.process import Process, ProcessState, state_of, this_process

MAX_SHOWN = 200
"""Characters of a path that a message shows where the path is too long for the system."""


class io_errors(NamedTuple):  # a context, as those of contextlib are
    """Turns errors of the local disk into errors that say where and what to do; gives the place.

    A missing file stays FileNotFoundError when reading; when writing, a missing folder is an error
    for the user. That a file is there already stays FileExistsError.
    """

    where: str
    writing: bool = False

    def __enter__(self) -> str:
        return self.where

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, FileExistsError):
            return
        if not isinstance(error, FileNotFoundError):
            raise _translated(error, self.where) from error
        if self.writing:
            raise ResourceError(
                "the folder to write to does not exist",
                where=self.where,
                fix="create it first, or choose another output",
            ) from error


def of_machine(error: OSError | MemoryError) -> OlmError:
    """Return an error of the system that no module foresaw as one for people."""
    if isinstance(error, MemoryError):
        return ResourceError(
            "there is not enough memory",
            fix="use a smaller batch, fewer processes at once (--workers, where the command has "
            "it), or more memory",
        )
    name = error.filename
    where = printable(os.fsdecode(name)) if isinstance(name, str | bytes) else None
    return _translated(error, where)


def room_left(place: str) -> str:
    """Return how much room there is at a path, in words; "" where the system does not say.

    A file system may be out of inodes, one of which each file takes, with most bytes free.
    """
    try:
        found = os.statvfs(existing_parent(place))
    except OSError:
        return ""
    if found.f_files and not found.f_favail:
        return "its file system takes no more files: all inodes are in use"
    return f"{found.f_bavail * found.f_frsize:,} bytes are free there"


def _translated(error: OSError, where: str | None) -> OlmError:
    kind: type[OlmError] = ResourceError
    said, fix = error.strerror or str(error), "run the same command again; finished work is kept"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            left = room_left(where or ".")
            what = f"no space left to write{f'; {left}' if left else ''}"
            fix = f"make room, then {fix}"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            what = f"not allowed: {said}"
            fix = "choose a folder you may write to, or change its permissions"
        case errno.EMFILE | errno.ENFILE:
            what = "too many files are open"
            fix = "allow more: ulimit -n 4096, and run the same command again"
        case errno.ENOTDIR:
            kind, what, fix = InputError, "a file is where a folder should be", "check the path"
        case errno.EISDIR:
            kind, what, fix = InputError, "this is a folder, not a file", "check the path"
        case errno.ELOOP | errno.ENAMETOOLONG | errno.ENOENT:
            kind, what, fix = InputError, f"no such place: {said.lower()}", "check the path"
            where = where and where[:MAX_SHOWN]
        case _:
            what = f"input/output error: {said}"
    return kind(what, where=where, fix=fix)


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
        raise _in_the_way(path) from error


def refuse_file_above(path: str) -> None:
    """Refuse a folder's name where something else than a folder stands, or above it.

    Raises:
        ResourceError: as `make_folder`.
    """
    place = os.path.abspath(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise _in_the_way(path)


def _in_the_way(path: str) -> ResourceError:
    return ResourceError(
        "a file is in the way of the folder to write to",
        where=path,
        fix="choose another output, or move the file",
    )


def write_durable(path: Path, data: bytes) -> None:
    """Write a file and wait until its bytes are on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Wait until the names of a folder, or the bytes of a file, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    return state_of(process) in (ProcessState.running, ProcessState.stopped)


def _prefix(parent: Path | None) -> str:
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:24]  # sockets' paths are short
    return f"{_PREFIX if parent is None else BESIDE}{host}-"
