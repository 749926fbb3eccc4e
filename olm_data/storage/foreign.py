"""Folders that hold a user's own files, which no output may be made among.

    names in the folder -> somebody else's? -> and no file that says it is ours -> refused

Never: writes or deletes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from contextlib import suppress
from itertools import islice

from olm_data.errors import UsageError, printable
from olm_data.storage.store import Store

_LOOKED_AT = 1000
"""Names of a remote folder that are looked at."""

_OF_THE_SYSTEM = frozenset({".DS_Store", "lost+found", ".snapshot"})
Foreign = Callable[[Set[str], Callable[[str], Set[str]]], Set[str]]
_MARKS = (b'"olm-dataset"', b'"olm-plan"')
_HEAD = 1 << 20


def refuse_foreign(store: Store, foreign: Foreign, *marks: str, kind: str = "a dataset") -> None:
    """Refuse a folder that holds files of somebody else, and nothing that says it is ours.

    Args:
        foreign: which names are somebody else's; is given all of them, and how to look into a
            folder among them.
        marks: files that say so by their content: `"format": "olm-..."`.
        kind: what the folder is to hold, for the message.

    Raises:
        UsageError: it does; names some.
    """
    found = sorted(foreign(_names(store, ""), lambda folder: _names(store, folder)))
    if not found or any(_is_marked(store, mark) for mark in marks):
        return
    shown = ", ".join(map(printable, found[:3]))
    more = f" and {len(found) - 3:,} more" if len(found) > 3 else ""
    raise UsageError(
        f"the output folder holds files that are not of {kind}",
        where=store.root,
        why=f"it holds {shown}{more}",
        fix="name a new or an empty folder",
    )


def _names(store: Store, folder: str) -> set[str]:
    """Return the names right in a folder; those of folders end with a slash."""
    if store.remote:
        prefix = store.key("x").removesuffix("x") + folder
        keys = (item.key.removeprefix(prefix) for item in store.bucket.list(prefix))
        parts = (key.partition("/") for key in islice(keys, _LOOKED_AT))
        return {name + slash for name, slash, _ in parts} - {""}
    with (
        suppress(FileNotFoundError, NotADirectoryError),  # whoever makes it says what is wrong
        os.scandir(os.path.join(store.root, folder)) as found,
    ):
        return {
            item.name + "/" * item.is_dir() for item in found if item.name not in _OF_THE_SYSTEM
        }
    return set()


def _is_marked(store: Store, name: str) -> bool:
    if not store.remote and not os.path.isfile(store.url(name)):
        return False
    with suppress(FileNotFoundError):
        head = store.read(name, 0, _HEAD)
        return any(mark in head for mark in _MARKS)
    return False
