"""Being the only writer of a folder, and clearing what killed writers left there.

    exclusive(store) -> does the store keep two writers apart? -> lease -> clear -> body
                                                               -> clear -> lease given back

Only the holder clears: staging folders of a writer that was taken over may be in use by the new
one.

Also: before work starts: may we write there, and does the store keep two writers apart?
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from olm_data.errors import ConflictError, OlmError, StorageError
from olm_data.storage.disk import abandoned
from olm_data.storage.lease import (
    TAKEOVER_SECONDS,
    Lease,
    LeaseLostError,
    Seen,
    acquire,
    delete_if,
    put_if,
    read_versioned,
)
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.store import STAGING_PREFIX, WORKER_PREFIX, Store

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
            note = "single writer: nothing keeps a second run from overwriting this one"
            probe.notes.append(note)
        else:
            verdict = conditional_create(probe)
            if verdict != "honoured":
                raise StorageError(
                    f"this store {_WORDS[verdict]} conditional writes (If-None-Match)",
                    where=store.root,
                    why="two runs that write there at a time would overwrite each other unseen",
                    fix=f"make sure that nobody else writes there, and add {option}",
                )
    return probe.notes


_WORDS: dict[Verdict, str] = {"ignored": "ignores", "refused": "refuses"}


class Probe:
    """A probe object's name in a store, and its removal at the end of the block.

    Attributes:
        store: the place, answering or failing within seconds.
        name: of the probe object; the caller writes it.
        notes: what the user should know: also what went wrong at the removal.
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
    replace = partial(put_if, probe.store, probe.name, b"mine ", over=_replaced(probe))
    found = _verdict(replace)
    if found == "honoured":
        probe.store.delete(probe.name)
        found = _verdict(replace)
    return found


def conditional_delete(probe: Probe) -> Verdict:
    """Remove a version of the probe that was replaced, which is to be refused."""
    return _verdict(partial(delete_if, probe.store, probe.name, over=_replaced(probe)))


def _replaced(probe: Probe) -> Seen:
    """Write the probe twice, and return what the first time left."""
    probe.store.put(probe.name, b"seen ")
    before = read_versioned(probe.store, probe.name, 5)
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


HIDDEN_PREFIX = ".lease-"
"""Start of the names of leases, hidden in the folders of datasets."""


@contextlib.contextmanager
def exclusive(
    store: Store,
    *,
    prefix: str = HIDDEN_PREFIX,
    keep: bool = False,
    busy: str = "another process is writing this output",
    fix: str = "wait for it to finish, or choose another --output",
    note: Callable[[str], None] = lambda text: None,
    takeover: float = TAKEOVER_SECONDS,
    single_writer: str = "--single-writer",
    probe: bool = True,
) -> Iterator[Lease]:
    """Hold a folder as its only writer; the body calls `check` before what others can see.

    Args:
        store: the folder.
        prefix, busy, fix, takeover: see `acquire`.
        keep: the lease stays, given back, so that fence numbers go on.
        note: told of what the user should know.
        single_writer: how the user says that nobody else writes there.
        probe: try whether the store keeps two writers apart.

    Raises:
        ConflictError: another process writes here, or has taken over.
        StorageError: the store does not keep two writers apart.
    """
    for text in preflight(store, single_writer) if probe else []:
        note(text)
    lease = acquire(store, prefix=prefix, busy=busy, fix=fix, note=note, takeover=takeover)
    try:
        _clear(store, lease, STAGING_PREFIX)
        yield lease
    except Exception as error:
        if isinstance(error, LeaseLostError) or not _lost(lease):
            raise
        assert lease.lost is not None
        raise lease.lost from error  # what broke may be the other one's doing
    finally:
        with contextlib.suppress(OlmError):
            _clear(store, lease, STAGING_PREFIX, WORKER_PREFIX)
        lease.release(keep=keep)


def _lost(lease: Lease) -> bool:
    with contextlib.suppress(OlmError):  # a store that is down answers later
        lease.check()
    return lease.lost is not None


def _clear(store: Store, lease: Lease, *prefixes: str) -> None:
    lease.check()
    abandoned(remove=True)
    for prefix in prefixes:
        store.clear_staging(prefix)
