"""`--to mds`: shards of MosaicML streaming, a sample a document: id, tokens, the kept columns.

    shard.00000.mds    u32 n, u32 [n + 1] offsets in the file, the columns as JSON, the samples
    a sample           u32 bytes of each field of no fixed size, then the fields: the id; of the
                       tokens a byte for the width of the length (0, 1, 2: 1, 2, 4 bytes) plus 4 for
                       one dimension, the length, the ids; the kept columns as str, int, float64 or,
                       for truth values and where there are nulls, json
    index.json         every shard with its columns and size, written last

Layout from streaming/base/format/mds (version 2).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.exporting import samples
from olm_data.exporting.samples import Column, Kind, Samples

_ENCODINGS: dict[Kind, str] = {"str": "str", "int": "int", "float": "float64", "json": "json"}


class Mds(Samples):
    """Writes `shard.*.mds` and `index.json`. See `base.Writer`."""

    fixed: ClassVar[Sequence[Kind]] = ("int", "float")

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        super().__init__(dataset, folder)
        # the format has no truth values; JSON reads back as what it was
        self.columns = [Column(c.name, "json") if c.kind == "bool" else c for c in self.columns]
        self._columns: dict[str, Any] = {
            "column_encodings": ["str", f"ndarray:{dataset.dtype.name}"]
            + [_ENCODINGS[column.kind] for column in self.columns],
            "column_names": ["id", "tokens"] + [column.name for column in self.columns],
            "column_sizes": [None, None]
            + [8 if column.kind in self.fixed else None for column in self.columns],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": samples.SHARD_BYTES,
            "version": 2,
        }
        self.head = json.dumps(self._columns, sort_keys=True).encode()
        self._bytes = self._least
        self._shards: list[dict[str, Any]] = []

    def file_name(self, number: int) -> str:
        """Return the name of shard `number`."""
        return f"shard.{number:05d}.mds"

    def encode_tokens(self, tokens: np.ndarray) -> bytes:
        """Return an array of one dimension and of a dtype that the index names."""
        width = 0 if len(tokens) < 1 << 8 else 1 if len(tokens) < 1 << 16 else 2
        shape = bytes([4 | width]) + len(tokens).to_bytes(1 << width, "little")
        return shape + tokens.tobytes()

    def written(self, name: str, size: int, samples: int) -> None:
        """Take note of a shard."""
        raw = {"basename": name, "bytes": size, "hashes": {}}
        self._shards.append(self._columns | {"raw_data": raw, "samples": samples, "zip_data": None})

    def finish(self) -> None:
        """Write the last shard and the index."""
        super().finish()
        index = {"shards": self._shards, "version": 2}
        (self.folder / "index.json").write_text(json.dumps(index, sort_keys=True))
