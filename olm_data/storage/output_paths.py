"""Where output may go: never nowhere, the root, the home folder, or among a user's own files.

name of a folder or a file -> refuse_output
names in the folder -> somebody else's? -> and no file that says it is ours -> refuse_foreign
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Set
from contextlib import suppress
from itertools import islice
from typing import Literal, NoReturn

from olm_data.errors import UsageError, printable
from olm_data.redaction import names_credentials
from olm_data.storage.names import acts, is_unicode
from olm_data.storage.objects import READ_ONLY, SCHEMES, WRITABLE, scheme_of
from olm_data.storage.store import Store, refuse_no_place

Foreign = Callable[[Set[str], Callable[[str], Set[str]]], Set[str]]

_URLS = ", ".join(f"{scheme}://" for scheme in WRITABLE)
_LOOKED_AT = 1000
"""Names of a remote folder that are looked at."""
_OF_THE_SYSTEM = frozenset({".DS_Store", "lost+found", ".snapshot"})
_MARKS = (b'"olm-dataset"', b'"olm-plan"')
_HEAD = 1 << 20


def refuse_output(
    name: str, option: str = "--output", kind: Literal["folder", "file", "local file"] = "folder"
) -> None:
    """Refuse what no output can be: nothing, the root, the home folder, what a shell left.

    Args:
        option: that names it, for messages.
        kind: what is to be written; a local file is one of this machine, whose name is no URL.

    Raises:
        UsageError: it cannot be there, or its name holds a credential or is no text.
    """

    def refuse(what: str, fix: str, why: str | None = None) -> NoReturn:
        raise UsageError(what, where=name or None, why=why, fix=fix)

    if kind == "folder":
        refuse_no_place(name)
    if not name.strip():
        refuse(f"{option} is empty", "is a shell variable unset? name the file to write")
    if acts(name):  # JSON, Arrow and object stores have no spelling for what is not UTF-8
        wrong = "holds control characters" if is_unicode(name) else "is not valid UTF-8"
        fix = "choose another name; in the C locale, set LANG=C.UTF-8"
        refuse(f"the name of the output {wrong}", fix)
    if names_credentials(name):
        refuse(
            "the name of the output holds a credential of this machine's environment",
            "choose another name",
            "it would be written into configurations, manifests and logs",
        )
    if kind != "folder" and (name.endswith("/") or os.path.isdir(name)):
        inside = printable(os.path.join(name, "NAME"))
        refuse(f"{option} is a folder, not a file", f"name a file in it: {option} {inside}")
    misspelt = re.match(rf"({'|'.join(SCHEMES)}|gcs|file):(?!//)/*", name, re.IGNORECASE)
    if misspelt:
        refuse(
            "the output looks like a URL, and is none",
            f"write {misspelt[1].lower()}://{printable(name[misspelt.end() :])}",
            "a folder of that name would be used here",
        )
    if name == "~" or name.startswith("~/"):
        meant = printable(os.path.expanduser(name))
        why = "a folder named ~ would be used here"
        refuse("the shell left ~ as it is", f"write {option} {meant}", why)
    if "://" in name and kind == "local file":
        refuse(
            f"{option} is a URL, and this file is written on this machine",
            "give a path, without file://"
            if name.startswith("file://")
            else f"write it here and copy it there: {option} {printable(os.path.basename(name))}",
        )
    if scheme_of(name) in READ_ONLY:
        what = f"storage at {scheme_of(name)}:// can only be read"
        refuse(what, f"write to a local folder or one of {_URLS}")
    place = os.path.realpath(name.removeprefix("file://"))
    if kind == "folder" and place in ("/", os.path.realpath(os.path.expanduser("~"))):
        refuse(
            f"the output is {'the root of the file system' if place == '/' else 'the home folder'}",
            "name a folder of its own",
            "the files of a dataset would lie among all others",
        )


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
