"""Local files as they are opened: regular ones only, no larger than they may be, and no link out.

    path -> open_regular -> file descriptor of a regular file | refused at once
         -> read_regular -> its bytes, at most `limit` of them

What others wrote may be a named pipe (whose open waits for ever), a device without an end, a
folder, or a link to any of these. What stands there is therefore looked at before it is opened, and
again once it is, without waiting, before a byte is read.
"""

from __future__ import annotations

import os
import stat
from typing import IO

from olm_data.errors import ValidationError

MAX_WHOLE = 256 << 20
"""Bytes of a file that is read or written whole where nobody knows another limit: of a run, an
export or an evaluation, whatever `Store.put` writes."""

MAX_DOCUMENT = 4 << 30
"""Bytes of a manifest, plan, job, lock, commit record or log: of ten million inputs and shards."""

PIECE = 1 << 20

MAX_SMALL = 1 << 20
"""Bytes of a heartbeat, a configuration, or another file that people could write by hand."""

MAX_CONFIG = 16 << 20
"""Bytes of a configuration that somebody else wrote."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str], *, within: str | None = None) -> IO[bytes]:
    """Open a local file for reading, if it is a regular one.

    Args:
        within: folder that a link must not lead out of; None follows links anywhere, for paths that
            the user typed.

    Raises:
        FileNotFoundError: there is nothing of this name.
        ValidationError: it is a pipe, device, socket or folder, or a link out of `within`.
        OSError: it cannot be opened.
    """
    path = os.fspath(path)
    refuse_special(os.stat(path).st_mode, path)  # opening a device may act on it
    if within is not None:
        refuse_link_out(path, within)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        refuse_special(os.fstat(handle).st_mode, path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(
    path: str | os.PathLike[str], limit: int = MAX_WHOLE, *, within: str | None = None
) -> bytes:
    """Return the bytes of a local file.

    Args:
        limit: bytes it may have at most.
        within: see `open_regular`.

    Raises:
        FileNotFoundError: there is nothing of this name.
        ValidationError: see `open_regular`; or the file is larger than `limit`.
        OSError: it cannot be read.
    """
    with open_regular(path, within=within) as file:
        size = os.fstat(file.fileno()).st_size
        refuse_large(size, limit, os.fspath(path))
        data = file.read(size + 1)
        while more := file.read(min(PIECE, limit + 1 - len(data))):  # it has grown
            data += more
        refuse_large(len(data), limit, os.fspath(path))
        return data


def refuse_special(mode: int, path: str) -> None:
    """Refuse what is no regular file. Args: mode: `st_mode` of what stands at `path`.

    Raises:
        ValidationError: it is a pipe, device, socket or folder.
    """
    if stat.S_ISREG(mode):
        return
    kind = next((name for test, name in _KINDS if test(mode)), "something else")
    raise ValidationError(
        f"{kind} is where a file is expected",
        where=path,
        why="only regular files are read",
        fix="check the path; in a dataset, restore the file from a copy",
    )


def refuse_large(size: int, limit: int, where: str) -> None:
    """Refuse a file of `size` bytes where at most `limit` can be.

    Raises:
        ValidationError: it is larger.
    """
    if size > limit:
        raise ValidationError(
            f"the file has {size:,} bytes; one of its kind has at most {limit:,}",
            where=where,
            why="it would have to fit into memory as a whole",
            fix="check that this is the file you meant; in a dataset, restore it from a copy",
        )


def refuse_link_out(path: str, folder: str) -> None:
    """Refuse a path that leads out of `folder` by a link.

    Raises:
        ValidationError: it does.
    """
    if os.path.dirname(path) == folder and not os.path.islink(path):
        return  # what nearly every file is; cheaper than to resolve its folders
    root, place = os.path.realpath(folder), os.path.realpath(path)
    if os.path.commonpath([root, place]) != root:
        raise ValidationError(
            "the file is a link to another place",
            where=path,
            why=f"it leads to {place}, outside its own folder",
            fix="copy the file there, or give the folder in which it lies",
        )
