"""What a format of another project is to the export: a writer that takes shards in order.

Dataset, shard by shard -> Writer.add -> files in a folder nobody reads yet
                        -> Writer.finish -> what spans all shards
Writer.lost -> sentences about what the format cannot carry
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.errors import InputError

PIECE = 1 << 20
"""Tokens, or document ends, moved at a time."""


@dataclass
class Counts:
    """What a writer has put into files; `linked` counts shards whose tokens were not copied."""

    documents: int = 0
    tokens: int = 0
    linked: int = 0
    without_id: int = 0
    broken_names: int = 0


class Writer(ABC):
    """Writes a dataset in one format.

    Args:
        dataset: what is written.
        folder: for the files, which nobody reads yet.

    Attributes:
        counts: of what was written, as the writer counted it, not as the manifest says.
        whole: its files are complete only after `finish`; else those that `add` leaves are.
    """

    whole: ClassVar[bool] = False

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.dataset, self.folder, self.counts = dataset, folder, Counts()

    @abstractmethod
    def add(self, index: int, shard: Shard) -> None:
        """Write the files of shard `index` of the dataset; called once a shard, in order."""

    @abstractmethod
    def finish(self) -> None:
        """Write what names or spans all shards."""

    def refuse_column(self, name: str, what: str) -> None:
        """Refuse a kept column with the name of what holds the tokens.

        Raises:
            InputError: there is one.
        """
        if name in kept_columns(self.dataset):
            raise InputError(
                f"a kept column is called {name}, as the {what} of the tokens is",
                where=self.dataset.store.root,
                fix="export to another format, or tokenise without keeping it",
            )

    @staticmethod
    def links(dataset: Dataset) -> bool:
        """Whether the tokens of this dataset need no copy, on the same filesystem."""
        return False

    @staticmethod
    @abstractmethod
    def lost(dataset: Dataset) -> list[str]:
        """Return a sentence for each thing in the dataset that these files cannot hold."""


def document_batches(
    shard: Shard, columns: list[str], most_tokens: int
) -> Iterator[tuple[int, np.ndarray, pa.RecordBatch]]:
    """Yield the documents of a shard in batches of bounded size.

    Args:
        columns: of `docs.parquet`.
        most_tokens: a batch has no more, unless it is a single document.

    Yields:
        (first token, uint64 [n] ends of the documents in the shard, n rows).
    """
    done = 0
    for rows in shard.docs.batches(columns):
        low = 0
        while low < rows.num_rows:
            first = int(shard.ends[done - 1]) if done else 0
            bound = np.uint64(first + most_tokens)
            ends = shard.ends[done : done + rows.num_rows - low]
            count = max(1, int(np.searchsorted(ends, bound, side="right")))
            yield first, ends[:count], rows.slice(low, count)
            low, done = low + count, done + count


def too_large(what: str, shard: Shard, why: str) -> InputError:
    """Return the error of something in a shard that a format has too few bits for."""
    fix = "export to another format"
    return InputError(what, where=shard.store.url(shard.name), why=why, fix=fix)


def kept_columns(dataset: Dataset) -> list[str]:
    """Return the names of the columns that were kept beside each document."""
    from olm_data.dataset.docs import docs_schema

    if not dataset.manifest.shards:
        return []
    known = set(docs_schema().names)
    return [name for name in dataset.open_shard(0).docs.schema().names if name not in known]


def lost_columns(dataset: Dataset, *, ids: bool, origins: bool, kept: bool = True) -> list[str]:
    """Return sentences on what stands beside the tokens and cannot be held.

    Args:
        ids: whether ids of documents are lost.
        origins: whether the file and line of each document are lost.
        kept: whether the kept columns are lost.
    """
    names = kept_columns(dataset) if kept else []
    what = (["ids"] if ids else []) + (["file and line"] if origins else [])
    said = [f"not in it: {' and '.join(what)} of each document"] if what else []
    return said + ([f"not in it: kept columns {', '.join(names)}"] if names else [])
