"""A small file written or removed in one stroke, only the version of it that was seen: a lease.

    look -> Seen -> mark(over=seen) -> remote: If-Match, or Google's generation
                                    -> disk:   compared through the handle that is written
         -> unmark(over=seen)          the same two conditions; on a disk a lock on the file itself

What was replaced or removed between the two, however long that was, is neither written nor removed.
A store that does not honour such conditions is found by `preflight.conditional_replace` and
`conditional_delete`. Such a file need not survive the machine.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from olm_data.errors import ConflictError
from olm_data.storage.disk import io_errors, remove_seen, write_in_place
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.store import Store


class Seen(NamedTuple):
    """What a file held, and the name of that version: "" on a disk, or where none is told."""

    data: bytes
    version: str


def look(store: Store, name: str, size: int) -> Seen | None:
    """Return the first `size` bytes of a file, with their version; None where there is none.

    Raises:
        StorageError: the store does not answer.
    """
    try:
        if not store.remote:
            return Seen(store.read(name, 0, size), "")
        found = store.bucket.piece(store.key(name), 0, size)
    except FileNotFoundError:
        return None
    except RemoteFailure as failure:
        if failure.status == 416:  # no byte at all
            return Seen(b"", "")
        raise
    return Seen(found.data, found.etag)


def mark(store: Store, name: str, data: bytes, *, over: Seen | None) -> None:
    """Write a small file.

    Args:
        data: as many bytes as `over` has.
        over: what it is to take the place of; None creates it. A version "" of a remote store, and
            `single_writer`, are no condition.

    Raises:
        ConflictError: something else is there by now, or nothing.
    """
    url = store.url(name)
    try:
        if not store.remote:
            with io_errors(url, writing=over is None):
                write_in_place(url, data, None if over is None else over.data)
        elif over is None:
            store.create(name, data)
        elif store.single_writer or not over.version:
            store.put(name, data)
        else:
            store.bucket.put(store.key(name), data, replaces=over.version)
    except (FileExistsError, FileNotFoundError) as error:
        raise ConflictError("another process has written this file", where=url) from error


def unmark(store: Store, name: str, *, over: Seen) -> None:
    """Remove a small file; one that is gone is no error.

    Args:
        over: what is to be removed. A version "" of a remote store, and `single_writer`, are no
            condition.

    Raises:
        ConflictError: something else is there by now.
    """
    url = store.url(name)
    try:
        if store.remote:
            version = "" if store.single_writer else over.version
            store.bucket.delete(store.key(name), etag=version)
            return
        with io_errors(url, writing=True), contextlib.suppress(FileNotFoundError):
            remove_seen(url, over.data)
    except FileExistsError as error:
        raise ConflictError("another process has written this file", where=url) from error
