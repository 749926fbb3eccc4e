"""Before work starts: may we write there, and does the store keep two writers apart?

    probe object created -> created again -> refused? -> deleted -> notes for the user

A store that ignores `If-None-Match` would let two runs overwrite each other's manifest in silence;
it is refused unless the user says that nobody else writes there (`--single-writer`). Takes three
requests.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Literal

from olm_data.errors import ConflictError, StorageError
from olm_data.storage.mark import Seen, look, mark, unmark
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
    first = _verdict(partial(probe.store.create, probe.name, b"probe"))
    if first == "refused":
        return first
    return _verdict(partial(probe.store.create, probe.name, b"another"))


def conditional_replace(probe: Probe) -> Verdict:
    """Write over a version of the probe that was replaced, then removed; return what comes of it.

    Both are to be refused: leases are renewed so.
    """
    replace = partial(mark, probe.store, probe.name, b"mine ", over=_replaced(probe))
    found = _verdict(replace)
    if found == "honoured":
        probe.store.delete(probe.name)
        found = _verdict(replace)
    return found


def conditional_delete(probe: Probe) -> Verdict:
    """Remove a version of the probe that was replaced, which is to be refused."""
    return _verdict(partial(unmark, probe.store, probe.name, over=_replaced(probe)))


def _replaced(probe: Probe) -> Seen:
    """Write the probe twice, and return what the first time left."""
    probe.store.put(probe.name, b"seen ")
    before = look(probe.store, probe.name, 5)
    assert before is not None, "it was just written"
    probe.store.put(probe.name, b"other")
    return before


def _verdict(change: Callable[[], None]) -> Verdict:
    try:
        change()
    except RemoteFailure as failure:
        if failure.status == 501 or failure.code == "NotImplemented":
            return "refused"
        raise
    except ConflictError:
        return "honoured"
    return "ignored"
