"""What is pushed or pulled: which files it is, what each must be, and which of them make it whole.

    folder | draft of a pull -> Kind.read -> Content -> sent or fetched -> Kind.damage

A kind is an ordinary module's worth of rules, `datasets.py` or `models.py`; `push.py` and `pull.py`
know neither manifests nor receipts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from olm_data.errors import printable
from olm_data.storage.hub import HubFile, Repository
from olm_data.storage.store import Store

CARD = "README.md"
MOST_CARD = 1 << 20  # bytes

Watch = Callable[[str, int, int], None]
"""Called with what is done (`verify`, `send`, `fetch`), and bytes done and in all."""


@dataclass(frozen=True)
class Content:
    """What lies in a folder.

    Attributes:
        store: the folder.
        digest: that names it.
        parts: sha256 of each file of it, by name; "" where nothing says it.
        last: those of them that come last: nobody takes the rest for the whole.
    """

    store: Store
    digest: str
    parts: Mapping[str, str]
    last: tuple[str, ...]

    def path(self, name: str) -> Path:
        """Return where a file of it lies."""
        return Path(self.store.url(name))


@dataclass(frozen=True)
class Branch:
    """What a repository has where a push begins.

    Attributes:
        head: the commit; None: there is no repository yet.
        files: by name.
        scratch: folder for files that are looked at.
    """

    place: Repository
    head: str | None
    files: Mapping[str, HubFile]
    scratch: Path

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a file, None where there is none."""
        if self.head is None or name not in self.files:
            return None
        return self.place.read(name, self.head, self.scratch, limit)


def some(names: Iterable[str], most: int = 3) -> str:
    """Return the first names of files, as a message shows them."""
    listed = sorted(map(printable, names))
    return ", ".join(listed[:most]) + ", ..." * (len(listed) > most)


class ContentKind(Protocol):
    """The rules of one kind of content; `name` is that of `Repository.kind`."""

    name: str

    def target(self, target: str) -> str:
        """Return the folder that an argument names.

        Raises:
            UsageError: it holds content of another kind.
        """

    def is_naming(self, name: str) -> bool:
        """Whether a file must be there before it can be told which others are parts."""

    def is_whole(self, has: Callable[[str], bool]) -> bool:
        """Whether there is such content, by the names of the files that are there."""

    def read(self, store: Store, has: Callable[[str], bool]) -> Content:
        """Return what lies in a folder, by its naming files only.

        Raises:
            InputError: there is none.
            ValidationError: what names its files is damaged.
        """

    def damage(self, content: Content, watch: Watch) -> str | None:
        """Compare every byte with what it must be; return what is wrong, None where all is well."""

    def settled(self, content: Content, branch: Branch, notes: list[str]) -> Content:
        """Return what of it goes to a branch; sentences about what is left there go into notes.

        Raises:
            ConflictError: the repository holds something else.
        """

    def card(
        self, content: Content, branch: Branch, licence: str | None, notes: list[str]
    ) -> bytes | None:
        """Return the card that is written for it; None: none is, or it is one of the parts."""
