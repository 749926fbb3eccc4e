"""Small results kept in the user's cache (XDG), each in a file of its own.

    write_private("encoders/ab12...", data)      whole or not at all; no error where it cannot
    read_private("encoders/ab12...", 1 << 18)    the bytes, or None

A cache is a convenience: what is missing, too long, no regular file, of somebody else or writable
for others is None, and what is read is still checked by whoever asked for it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of this package in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()) / "olm"


def read_private(name: str, most_bytes: int) -> bytes | None:
    """Return what was written under a name, or None."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(cache_folder() / name, flags), "rb") as file:
            info = os.fstat(file.fileno())
            mine = info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(info.st_mode) or not mine or info.st_size > most_bytes:
                return None
            return file.read(most_bytes)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


def write_private(name: str, data: bytes) -> None:
    """Keep bytes under a name, if the cache can be written."""
    with suppress(OSError, RuntimeError):
        path = cache_folder() / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
