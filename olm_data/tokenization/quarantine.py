"""What was dropped as bad, kept as it was read: `quarantine/shard-00000.jsonl.zst`, one a task.

    Drop (raw bytes of the record) -> Quarantine.add ... .publish -> JSON Lines, zstd
    JSON Lines -> raw of each line -> mend -> olm-data tokenize

The file depends on the task alone and is published before the shard's commit record, so a finished
task has it whole. A task that drops nothing as bad has none.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import zstandard

from olm_data.bounded_json import sha256_file
from olm_data.dataset.inputs import InputFile
from olm_data.sources.base import Drop
from olm_data.storage.disk import io_errors
from olm_data.storage.store import Store

FOLDER = "quarantine"
SUFFIX = ".jsonl.zst"
LEVEL = 3
CHUNK = 1 << 20
"""Bytes given to the compressor at a time, so that its output depends on the lines alone."""


class Quarantine:
    """Collects the bad records of one task in a staging folder.

    Args:
        store: the dataset's folder.
        name: the shard's name.
        inputs: the inputs that `Drop.input` counts in.
        staging: local folder for the unfinished file (see `Store.staging`).
    """

    def __init__(self, store: Store, name: str, inputs: Sequence[InputFile], staging: Path) -> None:
        self._store, self._name, self._inputs = store, f"{FOLDER}/{name}{SUFFIX}", inputs
        self._path = staging / (name + SUFFIX)
        self._file: BinaryIO | None = None
        self._packer = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compressobj()
        self._pending = bytearray()

    def add(self, drop: Drop) -> None:
        """Append a record that was dropped as bad."""
        self._pending += self._line(drop)
        while len(self._pending) >= CHUNK:
            self._write(self._packer.compress(bytes(self._pending[:CHUNK])))
            del self._pending[:CHUNK]

    def publish(self) -> None:
        """Make the file durable and visible; nothing to do where nothing was added."""
        if self._file is None and not self._pending:
            return
        self._write(self._packer.compress(bytes(self._pending)))
        file = self._write(self._packer.flush())
        with io_errors(self._store.url(self._name), writing=True):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            digest = sha256_file(self._path)
        self._store.publish(self._name, self._path, digest)

    def discard(self) -> None:
        """Close the unfinished file; the staging folder's owner removes it."""
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes) -> BinaryIO:
        with io_errors(self._store.url(self._name), writing=True):
            if self._file is None:
                self._file = open(self._path, "wb")  # noqa: SIM115  # closed by publish or discard
            self._file.write(data)
            return self._file

    def _line(self, drop: Drop) -> bytes:
        record: dict[str, str | int] = {
            "input": self._inputs[drop.input].path,
            "position": drop.position,
            "reason": drop.reason,
            "detail": drop.detail,
            "bytes": drop.size,
        }
        try:
            record["raw"] = drop.raw.decode()
        except UnicodeDecodeError:
            record["raw_base64"] = base64.b64encode(drop.raw).decode()
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
