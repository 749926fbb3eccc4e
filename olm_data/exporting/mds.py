"""`--to mds`: shards of MosaicML streaming, a sample a document with its id and tokens.

    shard.00000.mds    u32 n, u32 [n + 1] offsets in the file, the columns as JSON, the samples
    a sample           u32 bytes of the id, u32 bytes of the tokens, the id, a byte for the width of
                       the length (0, 1, 2: 1, 2, 4 bytes) plus 4 for one dimension, the length,
                       the ids
    index.json         every shard with its columns and size, written last

Layout from streaming/base/format/mds (version 2). A shard is begun before it would exceed 64 MiB,
as offsets are 32 bits wide and readers fetch whole shards; one document may make a larger one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.errors import InputError
from olm_data.exporting.base import PIECE, Counts, document_batches, lost_columns

SHARD_BYTES = 1 << 26
_MOST = 1 << 31  # bytes of one document; offsets stay below 2^32 beside it


class Mds:
    """Writes `shard.*.mds` and `index.json`. See `base.Writer`."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.dataset, self.folder, self.counts = dataset, folder, Counts()
        self._columns: dict[str, Any] = {
            "column_encodings": ["str", f"ndarray:{dataset.dtype.name}"],
            "column_names": ["id", "tokens"],
            "column_sizes": [None, None],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": SHARD_BYTES,
            "version": 2,
        }
        self._config = json.dumps(self._columns, sort_keys=True).encode()
        self._samples: list[bytes] = []
        self._bytes = self._least
        self._shards: list[dict[str, Any]] = []

    @property
    def _least(self) -> int:
        return 8 + len(self._config)

    def add(self, index: int, shard: Shard) -> None:
        """Write the documents of a shard; the last ones stay for the next shard's file.

        Raises:
            InputError: a document is too large for 32-bit offsets.
        """
        for first, ends, rows in document_batches(shard, ["id"], PIECE):
            size = int(ends[-1]) - first
            if size * self.dataset.dtype.itemsize > _MOST:
                raise InputError(
                    f"a document of {size:,} tokens is too large for an MDS shard",
                    where=shard.store.url(shard.name),
                    why="its offsets are 32 bits wide",
                    fix="export to another format",
                )
            tokens, start = shard.read(first, int(ends[-1])), 0
            ids, local = rows.column(0).to_pylist(), (ends - np.uint64(first)).tolist()
            for end, id in zip(local, ids, strict=True):
                self._append(id, tokens[start:end])
                start = end

    def _append(self, id: str | None, tokens: np.ndarray) -> None:
        self.counts.without_id += id is None
        name = (id or "").encode()
        width = 0 if len(tokens) < 1 << 8 else 1 if len(tokens) < 1 << 16 else 2
        shape = bytes([4 | width]) + len(tokens).to_bytes(1 << width, "little")
        sizes = np.array([len(name), len(shape) + tokens.nbytes], "<u4").tobytes()
        sample = b"".join([sizes, name, shape, tokens.tobytes()])
        if self._samples and self._bytes + 4 + len(sample) > SHARD_BYTES:
            self._flush()
        self._samples.append(sample)
        self._bytes += 4 + len(sample)
        self.counts.documents += 1
        self.counts.tokens += len(tokens)

    def _flush(self) -> None:
        name, count = f"shard.{len(self._shards):05d}.mds", len(self._samples)
        base = 4 + 4 * (count + 1) + len(self._config)
        offsets = base + np.cumsum([0, *map(len, self._samples)], dtype=np.int64)
        with open(self.folder / name, "wb") as file:
            file.write(np.array([count], "<u4").data)
            file.write(offsets.astype("<u4").data)
            file.write(self._config)
            file.writelines(self._samples)
            size = file.tell()
        raw = {"basename": name, "bytes": size, "hashes": {}}
        parts = {"raw_data": raw, "samples": count, "zip_data": None}
        self._shards.append(self._columns | parts)
        self._samples, self._bytes = [], self._least

    def finish(self) -> None:
        """Write the last shard and the index."""
        if self._samples:
            self._flush()
        index = {"shards": self._shards, "version": 2}
        (self.folder / "index.json").write_text(json.dumps(index, sort_keys=True))

    @staticmethod
    def links(dataset: Dataset) -> bool:
        """Tokens always need a copy: samples hold their sizes."""
        return False

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held."""
        return lost_columns(dataset, ids=False, origins=True)
