"""Where output may go: never nowhere, the root, the home folder. See `foreign` for users' files.

    name of a folder -> refuse_no_place (empty, the root)      every store, reading too
                     -> refuse_output   (also the home folder)  whoever makes a folder
    name of a file   -> refuse_no_file

An unset variable makes `--output "$OUT"` empty, and an empty name must not mean `/`.
Never: writes or deletes.
"""

from __future__ import annotations

import os
import re

from olm_data.errors import UsageError, printable
from olm_data.redaction import names_credentials
from olm_data.storage.names import acts, is_unicode
from olm_data.storage.objects import READ_ONLY, SCHEMES, WRITABLE, scheme_of

_URLS = ", ".join(f"{scheme}://" for scheme in WRITABLE)


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
            where=name,
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
            where=name,
            why="it would be written into configurations, manifests and logs",
            fix="choose another name",
        )
    _refuse_unexpanded(name)
    _refuse_read_only(name)
    local = name.removeprefix("file://")
    if "://" in local:
        return
    place = os.path.realpath(local)
    if place in ("/", os.path.realpath(os.path.expanduser("~"))):
        raise UsageError(
            f"the output is {'the root of the file system' if place == '/' else 'the home folder'}",
            where=name,
            why="the files of a dataset would lie among all others",
            fix="name a folder of its own",
        )


def refuse_no_file(name: str, option: str, *, remote: bool = False) -> None:
    """Refuse an output file's name that is empty, is a folder's, or is where none can be written.

    Args:
        remote: a URL will do, too; else the file is one of this machine.

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
            where=name,
            fix=f"name a file in it: {option} {printable(os.path.join(name, 'NAME'))}",
        )
    _refuse_unexpanded(name, option)
    if "://" in name and not remote:
        raise UsageError(
            f"{option} is a URL, and this file is written on this machine",
            where=name,
            fix="give a path, without file://"
            if name.startswith("file://")
            else f"write it here and copy it there: {option} {printable(os.path.basename(name))}",
        )
    _refuse_read_only(name)


def _refuse_read_only(name: str) -> None:
    if scheme_of(name) in READ_ONLY:
        raise UsageError(
            f"storage at {scheme_of(name)}:// can only be read",
            where=name,
            fix=f"write to a local folder or one of {_URLS}",
        )


def _refuse_unexpanded(name: str, option: str = "--output") -> None:
    """Refuse what a shell leaves of `--output=~/x` and what misspells a URL: `s3:/bucket/x`."""
    scheme = re.match(rf"({'|'.join(SCHEMES)}|gcs|file):(?!//)/*", name, re.IGNORECASE)
    if scheme:
        raise UsageError(
            "the output looks like a URL, and is none",
            where=name,
            why="a folder of that name would be used here",
            fix=f"write {scheme[1].lower()}://{printable(name[scheme.end() :])}",
        )
    if name == "~" or name.startswith("~/"):
        raise UsageError(
            "the shell left ~ as it is",
            where=name,
            why="a folder named ~ would be used here",
            fix=f"write {option} {printable(os.path.expanduser(name))}",
        )


def _refuse_no_text(name: str) -> None:
    """Refuse a name that is not UTF-8: JSON, Arrow and object stores have no spelling for it."""
    if acts(name):
        wrong = "holds control characters" if is_unicode(name) else "is not valid UTF-8"
        raise UsageError(
            f"the name of the output {wrong}",
            where=name,
            fix="choose another name; in the C locale, set LANG=C.UTF-8",
        )
