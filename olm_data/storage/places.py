"""Where output may go: never nowhere, the root, the home folder, or among a user's own files.

    name of a folder -> refuse_no_place (empty, the root)      every store, reading too
                     -> refuse_output   (also the home folder)  whoever makes a folder
                     -> refuse_foreign  (files that are not ours)
    name of a file   -> refuse_no_file

An unset variable makes `--output "$OUT"` empty, and an empty name must not mean `/`.
Never: writes or deletes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Set
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from olm_data.errors import UsageError, printable
from olm_data.redaction import names_credentials, redacted
from olm_data.storage.names import acts, is_unicode

if TYPE_CHECKING:
    from olm_data.storage.store import Store

_LOOKED_AT = 1000
"""Names of a remote folder that are looked at."""

_OF_THE_SYSTEM = frozenset({".DS_Store", "lost+found", ".snapshot"})
Foreign = Callable[[Set[str], Callable[[str], Set[str]]], Set[str]]
_MARKS = (b'"olm-dataset"', b'"olm-plan"')
_HEAD = 1 << 20


def refuse_no_place(name: str) -> None:
    """Refuse a local folder's name that is empty, or is the root of the file system.

    Raises:
        UsageError: it is.
    """
    if not name.strip():
        raise UsageError(
            "the name of the folder is empty",
            why="an empty name would mean the root of the file system",
            fix="is a shell variable unset? name a folder, or s3://BUCKET/PREFIX",
        )
    local = name.removeprefix("file://")
    if "://" not in local and os.path.normpath(local).strip("/") == "":
        raise UsageError(
            "the root of the file system cannot be used as a folder of data",
            where=printable(name),
            fix="name a folder of its own, or s3://BUCKET/PREFIX",
        )


def refuse_output(name: str) -> None:
    """Refuse what no output can be: nothing, the root, the user's home folder.

    Raises:
        UsageError: it is one of them, or holds a credential.
    """
    refuse_no_place(name)
    _refuse_no_text(name)
    if names_credentials(name):
        raise UsageError(
            "the name of the output holds a credential of this machine's environment",
            where=printable(redacted(name)),
            why="it would be written into configurations, manifests and logs",
            fix="choose another name",
        )
    _refuse_unexpanded(name)
    local = name.removeprefix("file://")
    if "://" in local:
        return
    place = os.path.realpath(local)
    if place in ("/", os.path.realpath(os.path.expanduser("~"))):
        raise UsageError(
            f"the output is {'the root of the file system' if place == '/' else 'the home folder'}",
            where=printable(name),
            why="the files of a dataset would lie among all others",
            fix="name a folder of its own",
        )


def refuse_foreign(store: Store, foreign: Foreign, *marks: str) -> None:
    """Refuse a folder that holds files of somebody else, and nothing that says it is ours.

    Args:
        foreign: which names are somebody else's; is given all of them, and how to look into a
            folder among them.
        marks: files that say so by their content: `"format": "olm-..."`.

    Raises:
        UsageError: it does; names some.
    """
    found = sorted(foreign(_names(store, ""), lambda folder: _names(store, folder)))
    if not found or any(_is_marked(store, mark) for mark in marks):
        return
    shown = ", ".join(map(printable, found[:3]))
    more = f" and {len(found) - 3:,} more" if len(found) > 3 else ""
    raise UsageError(
        "the output folder holds files that are not of a dataset",
        where=printable(store.root),
        why=f"it holds {shown}{more}",
        fix="name a new or an empty folder",
    )


def refuse_no_file(name: str, option: str) -> None:
    """Refuse an output file's name that is empty or is a folder's.

    Raises:
        UsageError: it is.
    """
    if not name.strip():
        raise UsageError(
            f"{option} is empty", fix="is a shell variable unset? name the file to write"
        )
    _refuse_no_text(name)
    if name.endswith("/") or os.path.isdir(name):
        raise UsageError(
            f"{option} is a folder, not a file",
            where=printable(name),
            fix=f"name a file in it: {option} {printable(os.path.join(name, 'NAME'))}",
        )


def _refuse_unexpanded(name: str) -> None:
    """Refuse what a shell leaves of `--output=~/x` and what misspells a URL: `s3:/bucket/x`."""
    scheme = re.match(r"(s3|hf|gs|gcs|az|abfs|https?|file):(?!//)/*", name, re.IGNORECASE)
    if scheme:
        raise UsageError(
            "the output looks like a URL, and is none",
            where=printable(name),
            why="a folder of that name would be made here",
            fix=f"write {scheme[1].lower()}://{printable(name[scheme.end() :])}",
        )
    if name == "~" or name.startswith("~/"):
        raise UsageError(
            "the shell left ~ as it is",
            where=printable(name),
            why="a folder named ~ would be made here",
            fix=f"write --output {printable(os.path.expanduser(name))}",
        )


def _refuse_no_text(name: str) -> None:
    """Refuse a name that is not UTF-8: JSON, Arrow and object stores have no spelling for it."""
    if acts(name):
        wrong = "holds control characters" if is_unicode(name) else "is not valid UTF-8"
        raise UsageError(
            f"the name of the output {wrong}",
            where=printable(name),
            fix="choose another name; in the C locale, set LANG=C.UTF-8",
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
