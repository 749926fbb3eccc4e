"""`--to litdata`: chunks of LitData, a sample a document: id, tokens, the kept columns.

    chunk-0-0.bin    u32 n, u32 [n + 1] offsets in the file, the samples
    a sample         u32 bytes of each field, then the fields: the id, the ids of the tokens alone,
                     the kept columns as str, int (int64), float (float64), bool, or, where there
                     are nulls, JSON text
    index.json       every chunk with its size, and the fields' names and kinds, written last

Layout from litdata/streaming (writer.py, serializers.py, PyTreeLoader of item_loader.py). Never: a
field that its reader would unpickle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.exporting import samples
from olm_data.exporting.samples import Samples, typed_columns

_DTYPES = {"uint16": 5, "uint32": 6}  # places in litdata's list of NumPy types


class LitData(Samples):
    """Writes `chunk-*.bin` and `index.json`. See `base.Writer`."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        super().__init__(dataset, folder)
        self._chunks: list[dict[str, Any]] = []

    def file_name(self, number: int) -> str:
        """Return the name of chunk `number`, of the one writer there is."""
        return f"chunk-0-{number}.bin"

    def encode_tokens(self, tokens: np.ndarray) -> bytes:
        """Return the ids; the index names their dtype."""
        return tokens.tobytes()

    def written(self, name: str, size: int, samples: int) -> None:
        """Take note of a chunk."""
        self._chunks.append(
            {"chunk_bytes": size, "chunk_size": samples, "dim": None, "filename": name}
        )

    def finish(self) -> None:
        """Write the last chunk and the index."""
        super().finish()
        names = ["id", "tokens"] + [column.name for column in self.columns]
        kinds = ["str", f"no_header_numpy:{_DTYPES[self.dataset.dtype.name]}"]
        kinds += ["str" if column.kind == "json" else column.kind for column in self.columns]
        config = {
            "chunk_bytes": samples.SHARD_BYTES,
            "chunk_size": None,
            "compression": None,
            "data_format": kinds,
            "data_spec": _tree_of(names),
            "encryption": None,
            "item_loader": "PyTreeLoader",
        }
        index = {"chunks": self._chunks, "config": config}
        (self.folder / "index.json").write_text(json.dumps(index, sort_keys=True))

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held, and what is held as text."""
        said = Samples.lost(dataset)
        text = [column.name for column in typed_columns(dataset) if column.kind == "json"]
        if text:
            said.append(f"as JSON text, as they hold nulls: kept columns {', '.join(text)}")
        return said


def _tree_of(names: list[str]) -> str:
    """Spell a dict with these keys as PyTorch's tree specifications do (version 1)."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    spec = {
        "type": "builtins.dict",
        "context": json.dumps(names),
        "children_spec": [leaf] * len(names),
    }
    return json.dumps([1, spec])
