"""`--to hf`: a folder for `datasets.load_from_disk`, a row a document.

    data-00000-of-00003.arrow    Arrow IPC stream: id (string), input_ids (list of uint16 | uint32),
                                 the kept columns; one file a shard
    dataset_info.json            empty: the columns' types are those of the Arrow files
    state.json                   the files in order, and a fingerprint, written last

Layout from datasets/arrow_dataset.py (Dataset.load_from_disk). Rows are written in batches of about
four million tokens, which is what a reader maps and what stays in memory here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from olm_data.arrow_values import numbers
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.errors import InputError
from olm_data.extensions.exporting.base import Writer, document_batches, kept_columns, lost_columns

BATCH_TOKENS = 1 << 22
_MOST = 2**31 - 1  # an Arrow list counts in int32


class HuggingFace(Writer):
    """Writes Arrow files that `datasets` maps."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        super().__init__(dataset, folder)
        self._files: list[str] = []
        self._kept = kept_columns(dataset)
        if "input_ids" in self._kept:
            raise InputError(
                "a kept column is called input_ids, as the column of the tokens is",
                where=dataset.store.root,
                fix="export to another format, or tokenise without keeping it",
            )

    def add(self, index: int, shard: Shard) -> None:
        """Write the Arrow file of a shard.

        Raises:
            InputError: a document is too long for an Arrow list.
        """
        name = f"data-{index:05d}-of-{len(self.dataset.manifest.shards):05d}.arrow"
        item = pa.from_numpy_dtype(self.dataset.dtype)
        rest = [shard.docs.schema().field(column) for column in self._kept]
        schema = pa.schema([("id", pa.string()), ("input_ids", pa.list_(item)), *rest])
        columns = ["id", *self._kept]
        with (
            pa.OSFile(str(self.folder / name), "wb") as file,
            pa.ipc.new_stream(file, schema) as out,
        ):
            for first, ends, rows in document_batches(shard, columns, BATCH_TOKENS):
                if int(ends[-1]) - first > _MOST:
                    raise InputError(
                        f"a document of {int(ends[-1]) - first:,} tokens is too long",
                        where=shard.store.url(shard.name),
                        why="a list of Arrow's has at most 2,147,483,647 items",
                        fix="export to another format",
                    )
                offsets = np.append(np.int32(0), (ends - np.uint64(first)).astype(np.int32))
                ids = numbers(shard.read(first, int(ends[-1])), item)
                lists = pa.ListArray.from_arrays(numbers(offsets, pa.int32()), ids)
                values = [rows.column("id"), lists, *(rows.column(c) for c in self._kept)]
                out.write_batch(pa.record_batch(values, schema=schema))
                self.counts.documents += len(lists)
                self.counts.tokens += len(ids)
        self._files.append(name)

    def finish(self) -> None:
        """Name the files in order."""
        (self.folder / "dataset_info.json").write_text("{}")
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self._files],
            "_fingerprint": self.dataset.digest[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (self.folder / "state.json").write_text(json.dumps(state, indent=2))

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held: the kept columns can."""
        return lost_columns(dataset, ids=False, origins=True, kept=False)
