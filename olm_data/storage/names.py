"""Names that stand in files of others: of files below a folder, of sources, stages and columns.

    manifest, lock, plan, job -> refuse_escape (names of files), is_name (all other names) -> used
    a folder that is read     -> is_working: what this program keeps there while it works

A name is checked where it is decoded, so that nothing behind has to ask again. Paths of a dataset's
inputs are no names: they may hold what a file system lets them, and are shown escaped.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from olm_data.errors import ValidationError

MAX_NAME = 1024
"""Characters of a column's or file's name."""

_MIXED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_WORKING = re.compile(
    r"\.lease-\d{6,15}\.json|\.olm-probe-[0-9a-f]{32}|\.olm-exporting\.json"
    r"|(\.staging-|\.worker-.+~|\.olm-staging-.+-\d+-)[a-z0-9_]{8}"
    r"|\..+\.(exporting-(lease-\d{6,15}\.json|\d{6,15})|pulling(-look|-lease-\d{6,15}\.json)?)"
)
_ACTS = {"Cc", "Cs", "Zl", "Zp"}  # controls, surrogates, line and paragraph separators
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@lru_cache(maxsize=4096)  # a name that was found good is good
def refuse_escape(name: str) -> None:
    """Refuse a name that leads out of the folder it is looked for in, or forges a log line.

    Raises:
        ValidationError: it does.
    """
    parts = name.removesuffix("/").split("/")
    bad = not name.isprintable() or len(name) > MAX_NAME or "\\" in name
    if name and (bad or {"", ".", ".."} & set(parts)):
        raise ValidationError(
            "a name leads out of its folder",
            where=name[:MAX_NAME],
            why="a manifest or plan that names files elsewhere was not written by olm-data",
            fix="do not use this dataset; restore it from a copy",
        )


def is_working(path: str) -> bool:
    """Whether a file or folder is of work that is going on, or was killed: no input, no output.

    Leases, probes, claims, and what lies in folders for unfinished files. Whoever reads or judges a
    folder asks this, and no other list of such names stands anywhere; `doctor --clean` tells the
    kinds apart, to remove them.
    """
    return any(_WORKING.fullmatch(part) for part in path.split("/") if part.startswith("."))


def is_mixture_name(name: str) -> bool:
    """Whether a lock may name a source, a stage or a group so."""
    return _MIXED.fullmatch(name) is not None


def is_column_name(name: str) -> bool:
    """Whether a column may be called so: nothing in it acts on a terminal or turns its text."""
    return 0 < len(name) <= MAX_NAME and not acts(name)


def is_unicode(text: str) -> bool:
    """Whether JSON, Arrow and object stores can hold a text: no byte of it is other than UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def acts(text: str) -> bool:
    """Whether something in a text acts on a terminal, breaks its line or turns its direction."""
    return not text.isprintable() and any(
        c in _TURNS or unicodedata.category(c) in _ACTS for c in text
    )
