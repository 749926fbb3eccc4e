"""`--dedup exact`: of documents with the same text the first in input order stays.

    first pass   a task: units -> read, select -> keys (content hash, bytes) -> dedup/
    parent       keys of all tasks, after those of the shards there are already (duplicates.py)
                 -> all but the first of each kind -> a bit a document -> dedup/, a file a task
    second pass  a task: its bits -> those documents are dropped as "duplicate"

So which document stays depends on the inputs alone: not on workers, the runner, or how often the
run was interrupted. Files carry the sha256 of their content and the plan's digest in their name;
finished ones are kept by a rerun. All are removed after the manifest is published. Never: compares
texts; two texts are the same if hash (64 bits) and size agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from olm_data.dataset.manifest import ShardInfo
from olm_data.dataset.plan import Plan
from olm_data.errors import ValidationError
from olm_data.runners.base import Report
from olm_data.select.digests import content_hashes, document_digests
from olm_data.sources.base import DocumentBatch
from olm_data.storage.store import Store
from olm_data.tokenization.duplicates import Keys, later_copies, stored_keys

FOLDER = "dedup"
_KEY = np.dtype([("hash", "<u8"), ("bytes", "<i8")])
_SHA256 = 32


def write_keys(store: Store, plan: Plan, task: int, keys: Keys) -> None:
    """Store what the first pass found in a task."""
    rows = np.empty(len(keys[0]), _KEY)
    rows["hash"], rows["bytes"] = keys
    _write(store, _name(plan, task, "keys"), rows.tobytes())


def read_keys(store: Store, plan: Plan, task: int) -> Keys | None:
    """Return the keys of a task, or None where they are not there, or not whole."""
    data = _read(store, _name(plan, task, "keys"))
    if data is None:
        return None
    rows = np.frombuffer(data, _KEY)
    return rows["hash"], rows["bytes"]


def find_keys(batches: Iterable[DocumentBatch], report: Report) -> Keys:
    """Return the keys of all documents, in order."""
    hashes, sizes = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for batch in batches:
        hashes.append(content_hashes(document_digests(batch.data, batch.offsets)))
        sizes.append(batch.text_bytes)
        report(documents=batch.documents, text_bytes=len(batch.data))
    return np.concatenate(hashes), np.concatenate(sizes)


def write_drops(
    store: Store,
    plan: Plan,
    documents: Sequence[int],
    before: Sequence[tuple[Store, ShardInfo]],
    documents_before: int,
) -> int:
    """Find the documents to drop from the keys of all tasks, and store a list for each task.

    Args:
        documents: how many each task has.
        before: shards whose documents come before all of these, by store and name.
        documents_before: how many they have.

    Returns:
        how many documents are dropped.

    Raises:
        ValidationError: keys have gone since they were written, or the shards are damaged.
        ResourceError: no room for scratch files (24 bytes a document, with over 4 million).
    """

    def found() -> Iterator[Keys]:
        for task, count in enumerate(documents):
            keys = read_keys(store, plan, task)
            if keys is None or len(keys[0]) != count:
                raise ValidationError(
                    "what the first pass of --dedup found is damaged",
                    where=store.url(_name(plan, task, "keys")),
                    fix="run the same command again",
                )
            yield keys

    # a task's bits begin at a byte of their own
    bytes_of = [-(-count // 8) for count in documents]
    first_byte = np.concatenate([[0], np.cumsum(bytes_of)]).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(documents)]).astype(np.int64)
    bits, dropped = np.zeros(int(first_byte[-1]), np.uint8), 0
    with store.staging() as scratch:
        total = documents_before + int(first[-1])
        for numbers, _ in later_copies(chain(stored_keys(before), found()), total, scratch):
            mine = numbers[numbers >= documents_before] - documents_before
            tasks = np.searchsorted(first, mine, side="right") - 1
            place = first_byte[tasks] * 8 + mine - first[tasks]
            np.bitwise_or.at(bits, place >> 3, np.uint8(128) >> (place & 7).astype(np.uint8))
            dropped += len(mine)
    for task, count in enumerate(documents):
        part = bits[first_byte[task] : first_byte[task + 1]]
        _write(store, _name(plan, task, "drops"), count.to_bytes(8, "little") + part.tobytes())
    _write(store, _name(plan, None, "done"), dropped.to_bytes(8, "little"))
    return dropped


def drops_found(store: Store, plan: Plan) -> bool:
    """Whether the lists of all tasks are there."""
    return _read(store, _name(plan, None, "done")) is not None


def read_drops(store: Store, plan: Plan, task: int) -> np.ndarray:
    """Return bool [d]: which documents of a task are dropped.

    Raises:
        ValidationError: the list is missing or damaged.
    """
    name = _name(plan, task, "drops")
    data = _read(store, name)
    if data is None:
        raise ValidationError(
            "the list of duplicates to drop is missing or damaged",
            where=store.url(name),
            fix=f"delete the folder {store.url(FOLDER)} and run the same command again",
        )
    bits = np.frombuffer(data, np.uint8, offset=8)
    return np.unpackbits(bits, count=int.from_bytes(data[:8], "little")).astype(bool)


def clear(store: Store) -> None:
    """Remove what both passes left in the store."""
    store.child(FOLDER).clear()


def _name(plan: Plan, task: int | None, kind: str) -> str:
    number = "" if task is None else f"-{task:05d}"
    return f"{FOLDER}/{plan.digest[:16]}{number}.{kind}"


def _write(store: Store, name: str, data: bytes) -> None:
    store.put(name, hashlib.sha256(data).digest() + data)


def _read(store: Store, name: str) -> bytes | None:
    try:
        data = store.read(name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    body = data[_SHA256:]
    return body if hashlib.sha256(body).digest() == data[:_SHA256] else None
