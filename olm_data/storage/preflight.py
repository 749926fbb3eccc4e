"""Before work starts: may we write there, and does the store keep two writers apart?

    probe object created -> created again -> refused? -> deleted -> notes for the user

A store that ignores `If-None-Match` would let two runs overwrite each other's manifest in silence;
it is refused unless the user says that nobody else writes there (`--single-writer`). Takes three
requests.
"""

from __future__ import annotations

import uuid
from typing import Literal

from olm_data.errors import ConflictError, StorageError
from olm_data.storage.mark import look, mark, unmark
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.store import Store

PROBE = ".olm-probe-"
Verdict = Literal["honoured", "ignored", "refused"]


def preflight(store: Store, option: str = "--single-writer") -> list[str]:
    """Check that a remote store can be worked with; return what the user should know.

    Args:
        store: the folder.
        option: how the user says that nobody else writes there.

    Raises:
        StorageError: it cannot be written, or does not honour conditional creates although several
            may write.
    """
    if not store.remote:
        return []
    with Probe(store) as probe:
        if store.single_writer:
            probe.store.put(probe.name, b"probe")
            notes = ["single writer: nothing keeps a second run from overwriting this one"]
        else:
            verdict = conditional_create(probe)
            if verdict != "honoured":
                raise StorageError(
                    f"this store {_WORDS[verdict]} conditional writes (If-None-Match)",
                    where=store.root,
                    why="two runs that write there at a time would overwrite each other unseen",
                    fix=f"make sure that nobody else writes there, and add {option}",
                )
            notes = []
    return notes + probe.notes


_WORDS: dict[Verdict, str] = {"ignored": "ignores", "refused": "refuses"}


class Probe:
    """A probe object's name in a store, and its removal at the end of the block.

    Attributes:
        store: the place, answering or failing within seconds.
        name: of the probe object; the caller writes it.
        notes: what went wrong at the removal.
    """

    def __init__(self, store: Store) -> None:
        self.store = Store(store.root)
        if self.store.remote:
            self.store.bucket.hasty = True
        self.name = PROBE + uuid.uuid4().hex
        self.notes: list[str] = []

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.store.delete(self.name)
        except StorageError as error:  # whoever may not delete can still write a dataset
            self.notes.append(f"the probe {self.store.url(self.name)} stays: {error.what}")


def conditional_create(probe: Probe) -> Verdict:
    """Create the probe twice and return what the store makes of the second time."""
    try:
        probe.store.create(probe.name, b"probe")
    except RemoteFailure as failure:
        if failure.status == 501 or failure.code == "NotImplemented":
            return "refused"
        raise
    try:
        probe.store.create(probe.name, b"another")
    except ConflictError:
        return "honoured"
    return "ignored"


def conditional_replace(probe: Probe) -> Verdict:
    """Write over a version of the probe that was replaced, then removed; return what comes of it.

    Both are to be refused: leases are renewed so.
    """
    store, name = probe.store, probe.name
    store.put(name, b"seen ")
    before = look(store, name, 5)
    assert before is not None, "it was just written"
    store.put(name, b"other")
    for removed in (False, True):
        if removed:
            store.delete(name)
        try:
            mark(store, name, b"mine ", over=before)
        except RemoteFailure as failure:
            if failure.status == 501 or failure.code == "NotImplemented":
                return "refused"
            raise
        except ConflictError:
            continue
        return "ignored"
    return "honoured"


def conditional_delete(probe: Probe) -> Verdict:
    """Remove a version of the probe that was replaced, which is to be refused."""
    store, name = probe.store, probe.name
    store.put(name, b"seen ")
    before = look(store, name, 5)
    assert before is not None, "it was just written"
    store.put(name, b"other")
    try:
        unmark(store, name, over=before)
    except RemoteFailure as failure:
        if failure.status == 501 or failure.code == "NotImplemented":
            return "refused"
        raise
    except ConflictError:
        return "honoured"
    return "ignored"
