"""What a long task has encoded: kept in `run/` until its shard is there, and not encoded again.

    batch of documents -> digests -> find: kept by an attempt that was killed?  -> Encoded
                                     else the encoder -> keep: a part every 64 MiB of ids

A compressed file cannot be entered in its middle, so a task that was killed reads its text again;
encoding is most of the work. Batches are found by the plan's digest and those of their texts: what
is found was made of the same bytes by the same plan.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

import msgspec
import numpy as np

from olm_data.encoders import Encoded
from olm_data.errors import ValidationError
from olm_data.regular_files import MAX_WHOLE
from olm_data.runners.heartbeat import RUN
from olm_data.storage.store import Store

LONG_TASK = 4 << 30
"""Bytes of text of a task above which what it encodes is kept."""

PART_BYTES = 64 << 20
"""Bytes of ids after which they are written."""

SUFFIX = ".ids"
SHA256_BYTES = 32
ARRAYS = {"ids": "<u4", "offsets": "<i8", "unknown": "<i8", "trained": "?", "cut": "<i8"}


class EncodedParts:
    """The parts of one task.

    Args:
        output: the dataset's store.
        plan: digest of the plan.
        shard: name of the task's shard.
    """

    def __init__(self, output: Store, plan: str, shard: str) -> None:
        self._store, self._plan, self._shard = output.child(RUN), plan.encode(), shard
        self._there = sorted(self._store.sizes(f"{shard}-"))
        self._unread = list(reversed(self._there))
        self._part: dict[bytes, bytes] = {}  # the part read last: key -> an `Encoded`
        self._new: dict[bytes, bytes] = {}

    def find(self, digests: bytes) -> Encoded | None:
        """Return what was made of a batch whose documents have these digests, or None.

        A part that is damaged is as one that is not there.
        """
        key = self._key(digests)
        while key not in self._part and self._unread:
            self._part = self._read(self._unread.pop())
        found = self._part.get(key)
        return None if found is None else _decoded(found)

    def keep(self, digests: bytes, made: Encoded) -> None:
        """Keep what was made of a batch; it is written once there is enough for a part."""
        self._new[self._key(digests)] = _encoded(made)
        if sum(map(len, self._new.values())) >= PART_BYTES:
            data = msgspec.msgpack.encode(self._new)
            data = hashlib.sha256(data).digest() + data
            if len(data) <= MAX_WHOLE:  # else a document of that size is encoded again
                name = f"{self._shard}-{len(self._there):06d}{SUFFIX}"
                self._store.put(name, data)
                self._there.append(name)
            self._new.clear()

    def clear(self) -> None:
        """Remove the parts: the shard is there."""
        for name in self._there:
            self._store.delete(name)

    def _key(self, digests: bytes) -> bytes:
        return hashlib.sha256(self._plan + digests).digest()

    def _read(self, name: str) -> dict[bytes, bytes]:
        with suppress(FileNotFoundError, ValidationError):  # removed meanwhile, or damaged
            data = self._store.read(name)
            if hashlib.sha256(data[SHA256_BYTES:]).digest() == data[:SHA256_BYTES]:
                return msgspec.msgpack.decode(data[SHA256_BYTES:], type=dict[bytes, bytes])
        return {}


def _encoded(made: Encoded) -> bytes:
    values = made._asdict()
    for name, dtype in ARRAYS.items():
        if values[name] is not None:
            values[name] = np.asarray(values[name], dtype).tobytes()
    return msgspec.msgpack.encode(values, enc_hook=int)  # of numpy's integers


def _decoded(data: bytes) -> Encoded:
    values = msgspec.msgpack.decode(data)
    for name, dtype in ARRAYS.items():
        if values[name] is not None:
            values[name] = np.frombuffer(values[name], dtype)
    return Encoded(**values)
