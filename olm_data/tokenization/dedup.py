"""`--dedup`: of documents with the same text, or nearly, the first in input order stays.

    first pass   a task: units -> read, select -> keys (content hash, bytes) -> dedup/, in parts
    parent       keys of all tasks, after those of the shards there are already (duplicates.py)
                 -> all but the first of each kind -> a bit a document -> dedup/, a file a task
    second pass  a task: its bits -> those documents are dropped as "duplicate"

With `minhash` a document has several keys (near_duplicates.py), and is dropped as "near_duplicate"
if one of them is a later copy.

So which document stays depends on the inputs alone: not on workers, the runner, or how often the
run was interrupted. Files carry the sha256 of their content and the plan's digest in their name;
finished ones are kept by a rerun. All are removed after the manifest is published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from itertools import count as numbers_from

import numpy as np

from olm_data.counts import MAX_COUNT
from olm_data.dataset.manifest import ShardInfo
from olm_data.dataset.plan import Plan
from olm_data.errors import ValidationError
from olm_data.runners.base import Report
from olm_data.select.selection import content_hashes, document_digests
from olm_data.sources.base import DocumentBatch
from olm_data.storage.store import Store
from olm_data.tokenization.duplicates import Keys, later_copies, pieces, stored_keys

FOLDER = "dedup"
_KEY = np.dtype([("hash", "<u8"), ("bytes", "<i8")])
_SHA256 = 32

PART = 1 << 22
"""Documents whose keys are in one file: 64 MiB."""


def find_keys(batches: Iterable[DocumentBatch], report: Report) -> Iterator[Keys]:
    """Yield the keys of all documents, in order."""
    for batch in batches:
        yield content_hashes(document_digests(batch.data, batch.offsets)), batch.text_bytes
        report(documents=batch.documents, text_bytes=len(batch.data))


def write_keys(store: Store, plan: Plan, task: int, found: Iterable[Keys]) -> int:
    """Store what the first pass finds in a task, as it is found; return how many documents."""
    count = 0
    for part, rows in enumerate(pieces(map(_rows, found), PART)):
        _write(store, _name(plan, task, f"{part}.keys"), rows.tobytes())
        count += len(rows)
    return count


def finish_keys(store: Store, plan: Plan, task: int, count: int) -> None:
    """Say that the keys of a task are whole, of so many documents."""
    _write(store, _name(plan, task, "count"), count.to_bytes(8, "little"))


def read_keys(store: Store, plan: Plan, task: int) -> Iterator[Keys]:
    """Yield the keys of a task, some million at a time.

    Raises:
        ValidationError: they are not there, or not whole.
    """
    left = int.from_bytes(_read(store, _name(plan, task, "count")) or b"\xff" * 8, "little")
    for part in numbers_from(0) if left else ():
        rows = np.frombuffer(_read(store, _name(plan, task, f"{part}.keys")) or b"", _KEY)
        left -= len(rows)
        if left < 0 or not len(rows):
            raise ValidationError(
                "what the first pass of --dedup found is damaged",
                where=store.url(_name(plan, task, "count")),
                fix="run the same command again",
            )
        yield rows["hash"], rows["bytes"]
        if not left:
            return


def keys_found(store: Store, plan: Plan, task: int) -> int | None:
    """Return of how many documents the keys of a task are there, or None."""
    try:
        return sum(len(hashes) for hashes, _ in read_keys(store, plan, task))
    except ValidationError:
        return None


def _rows(keys: Keys) -> np.ndarray:
    rows = np.empty(len(keys[0]), _KEY)
    rows["hash"], rows["bytes"] = keys
    return rows


def write_drops(
    store: Store,
    plan: Plan,
    documents: Sequence[int],
    before: Sequence[tuple[Store, ShardInfo]],
    documents_before: int,
    keys: int = 1,
) -> int:
    """Find the documents to drop from the keys of all tasks, and store a list for each task.

    Args:
        documents: how many each task has.
        before: shards whose documents come before all of these, by store and name.
        documents_before: how many they have.
        keys: of each document; one that has any key of an earlier one is dropped.

    Returns:
        how many documents are dropped.

    Raises:
        ValidationError: keys have gone since they were written, or the shards are damaged.
        ResourceError: no room for scratch files (24 bytes a document, with over 4 million).
    """

    found = chain.from_iterable(read_keys(store, plan, task) for task in range(len(documents)))
    # a task's bits begin at a byte of their own
    bytes_of = [-(-count // 8) for count in documents]
    first_byte = np.concatenate([[0], np.cumsum(bytes_of)]).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(documents)]).astype(np.int64)
    bits = np.zeros(int(first_byte[-1]), np.uint8)
    with store.staging() as scratch:
        total = documents_before + int(first[-1]) * keys
        for numbers, _ in later_copies(chain(stored_keys(before), found), total, scratch):
            mine = (numbers[numbers >= documents_before] - documents_before) // keys
            tasks = np.searchsorted(first, mine, side="right") - 1
            place = first_byte[tasks] * 8 + mine - first[tasks]
            np.bitwise_or.at(bits, place >> 3, np.uint8(128) >> (place & 7).astype(np.uint8))
    dropped = 0
    for task, count in enumerate(documents):
        part = bits[first_byte[task] : first_byte[task + 1]]
        dropped += int(np.count_nonzero(np.unpackbits(part)))
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
    store.put(name, hashlib.sha256(data).digest() + data, limit=MAX_COUNT)  # the digest proves it


def _read(store: Store, name: str) -> bytes | None:
    try:
        data = store.read(name, limit=MAX_COUNT)
    except (FileNotFoundError, NotADirectoryError):
        return None
    body = data[_SHA256:]
    return body if hashlib.sha256(body).digest() == data[:_SHA256] else None
