"""Being the only writer of a folder, and clearing what killed writers left there.

    exclusive(store) -> does the store keep two writers apart? -> lease -> clear -> body
                                                               -> clear -> lease given back

Only the holder clears: staging folders of a writer that was taken over may be in use by the new
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from olm_data.errors import OlmError
from olm_data.storage.disk import abandoned
from olm_data.storage.lease import TAKEOVER_SECONDS, Lease, LeaseLostError, acquire
from olm_data.storage.preflight import preflight
from olm_data.storage.store import STAGING_PREFIX, WORKER_PREFIX, Store

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
