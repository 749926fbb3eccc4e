"""JSON files of a store, as bytes that are worth decoding: whole, within a limit.

store --first 8 MiB--> all of it? else checked in pieces first --> bytes --> bounded_json.decode
"""

from __future__ import annotations

from olm_data.bounded_json import check
from olm_data.regular_files import MAX_WHOLE
from olm_data.storage.store import Store

_AT_ONCE = 8 << 20  # bytes


def read_json(store: Store, name: str, *, limit: int = MAX_WHOLE) -> bytes:
    """Return the bytes of a JSON file; a large one is looked over before it is in memory.

    Raises:
        FileNotFoundError: there is no such file.
        MalformedJson: it is large, and no JSON within bounds.
        ValidationError: it is no regular file, a link out of the folder, or larger than `limit`.
    """
    first = store.read(name, 0, min(_AT_ONCE, limit + 1))
    if len(first) < min(_AT_ONCE, limit + 1):
        return first
    size = store.size(name)
    if size is not None and size <= limit:
        check(store.pieces(name, _AT_ONCE))
    return store.read(name, limit=limit)
