"""JSON files of a store, within one limit: what is written can be read again.

bytes --write_json | create_json--> store --read_json, 32 MiB at a time--> bytes to decode
"""

from __future__ import annotations

from olm_data.bounded_json import MalformedJson, check
from olm_data.regular_files import MAX_DOCUMENT, refuse_large
from olm_data.storage.store import Store

_AT_ONCE = 32 << 20  # bytes; the manifest of 2 * 10^12 tokens
_BEGINNING = 1 << 16


def read_json(store: Store, name: str) -> bytes:
    """Return the bytes of a JSON file; of a large one that begins as none does, a piece is read.

    Raises:
        FileNotFoundError: there is no such file.
        MalformedJson: it is large, and no JSON within bounds.
        ValidationError: it is no regular file, a link out of the folder, or larger than
            `write_json` makes.
    """
    first = store.read(name, 0, min(_AT_ONCE, MAX_DOCUMENT + 1))
    if len(first) < min(_AT_ONCE, MAX_DOCUMENT + 1):
        return first
    check([first[:_BEGINNING]])
    refuse_large(store.size(name) or 0, MAX_DOCUMENT, store.url(name))
    parts, size = [first], len(first)
    for piece in store.pieces(name, _AT_ONCE, size):
        size += len(piece)
        refuse_large(size, MAX_DOCUMENT, store.url(name))  # it may have grown
        if b"\0" in piece:  # a hole: of a sparse file nothing is held
            raise MalformedJson("control bytes: this is not text")
        parts.append(piece)
    return b"".join(parts)


def write_json(store: Store, name: str, data: bytes) -> None:
    """Write a JSON file as `Store.put` does.

    Raises:
        InputError: it is larger than `read_json` takes.
    """
    store.put(name, data, limit=MAX_DOCUMENT)


def create_json(store: Store, name: str, data: bytes) -> None:
    """Write a JSON file as `Store.create` does, only if there is none.

    Raises:
        ConflictError: there is one.
        InputError: it is larger than `read_json` takes.
    """
    store.create(name, data, limit=MAX_DOCUMENT)
