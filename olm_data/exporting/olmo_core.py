"""`--to olmo-core`: what dolma writes and OLMo-core reads.

    shard-00000.npy       ids and nothing else, little-endian; not a NumPy file, whatever its name
    shard-00000.csv.gz    a line a document: start, end (tokens, end exclusive), id, src, loc

`loc` is the input's line or row, from 1; for inputs read by byte ranges, the offset of the line.
Never: a line break inside a field, as OLMo-core splits this file by lines and not as CSV.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.exporting.base import (
    PIECE,
    ByShard,
    Counts,
    document_batches,
    lost_columns,
    place_tokens,
)


class OlmoCore(ByShard):
    """Writes `.npy` and `.csv.gz` beside it. See `base.Writer`."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.dataset, self.folder, self.counts = dataset, folder, Counts()

    def add(self, index: int, shard: Shard) -> None:
        """Write the two files of a shard."""
        name = self.dataset.manifest.shards[index].name
        tokens, linked = place_tokens(self.dataset, shard, self.folder / f"{name}.npy")
        self.counts.tokens += tokens
        self.counts.linked += linked
        with (
            open(self.folder / f"{name}.csv.gz", "wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
            io.TextIOWrapper(packed, "utf-8", newline="") as text,
        ):
            self._write_documents(shard, csv.writer(text, lineterminator="\n").writerow)

    def _write_documents(self, shard: Shard, write_row: Callable[[list[Any]], Any]) -> None:
        inputs = self.dataset.manifest.inputs
        for first, ends, rows in document_batches(shard, ["id", "input", "position"], PIECE):
            starts = np.append(np.uint64(first), ends[:-1])
            ids, places, positions = (rows.column(k).to_pylist() for k in range(3))
            for start, end, id, place, position in zip(
                starts.tolist(), ends.tolist(), ids, places, positions, strict=True
            ):
                source = inputs[place]
                loc = position if source.position == "byte" else position + 1
                names = self._one_line(id), self._one_line(source.path)
                write_row([start, end, *names, loc])
            self.counts.documents += len(ends)

    def _one_line(self, name: str | None) -> str:
        if name is None:
            self.counts.without_id += 1
            return ""
        if "\n" in name or "\r" in name:
            self.counts.broken_names += 1
            return name.replace("\n", "\\n").replace("\r", "\\r")
        return name

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held, and where OLMo-core looks for borders."""
        said = lost_columns(dataset, ids=False, origins=False)
        if any(source.position == "byte" for source in dataset.manifest.inputs):
            said.append("loc is a byte offset, not a line, for inputs read by byte ranges")
        rules = dataset.manifest.tokenizer
        if rules.eos is None or rules.special == "allow":
            why = "documents have no EOS" if rules.eos is None else "text may hold EOS ids"
            said.append(
                f"{why}, and OLMo-core looks for EOS ids in local files unless "
                "use_array_if_local=False: with its default it sees other documents"
            )
        said.append("OLMo-core's NumpyFSLDataset leaves out the last partial row of each file")
        return said
