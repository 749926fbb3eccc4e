"""What a packing is: documents in, rows out, each a list of pieces of documents.

    windows of documents: (first tokens, lengths) --Packing.pack--> PackedRows, PackingCost
                                                                         `-> row_plan.py

A piece is some neighbouring tokens of one document. The pieces of a row have at most S + 1 tokens,
the last of which is only a label. `packings.py` names the packings there are;
docs/explanation/architecture.md shows how to add one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from olm_data.dataset.dataset import Dataset

Int64 = NDArray[np.int64]
Documents = Iterable[tuple[Int64, Int64]]
"""Windows of documents in order: first tokens and lengths, int64 [d] each."""

PART = 1 << 20
"""Rows given at once, where they can be made one after another."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some consecutive rows.

    Attributes:
        starts: int64 [p], first token of each piece, counted over the dataset.
        lengths: int64 [p], tokens of each piece.
        counts: int64 [rows], pieces of each row.
    """

    starts: Int64
    lengths: Int64
    counts: Int64


@dataclass(slots=True)
class PackingCost:
    """What a packing costs, summed over a dataset.

    Attributes:
        rows: rows made.
        tokens: tokens in them that are inputs.
        padding: positions without a token.
        cut_long: documents cut because they are longer than a row.
        cut_short: documents cut though they would have fitted into one row.
        dropped: tokens in no row.
    """

    rows: int = 0
    tokens: int = 0
    padding: int = 0
    cut_long: int = 0
    cut_short: int = 0
    dropped: int = 0


class Packing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How documents become rows; the fields are the keys that go with `packing: NAME`.

    A lock records the name alone: what the keys lead to is in the row plan and its digest.

    Attributes:
        name: in a manifest and a lock.
        planned: whether the rows of any source are in a row plan. Otherwise those of a whole
            dataset are windows of its stream of tokens (`concat.py`), and only a view needs a plan.
    """

    name: ClassVar[str]
    planned: ClassVar[bool] = True

    @abstractmethod
    def pack(
        self, dataset: Dataset, documents: Documents, sequence_length: int, cost: PackingCost
    ) -> Iterator[PackedRows]:
        """Yield the rows of some documents of a dataset, a part at a time.

        Args:
            dataset: for what the rows may depend on beside the documents, such as its digest.
            documents: windows of them, in order.
            sequence_length: S.
            cost: is added to.
        """

    def none_because(self, sequence_length: int) -> str:
        """Return why a source with few tokens has no row."""
        return f"packing: {self.name} makes no row of them"


def cut_documents(
    starts: Int64, lengths: Int64, counts: Int64, sequence_length: int
) -> Iterator[PackedRows]:
    """Yield the first `counts` [d] pieces of S tokens of each document, a row each.

    A piece after which the document goes on has one token more: its last label.
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    for low in range(0, total, PART):
        row = np.arange(low, min(low + PART, total), dtype=np.int64)
        document = np.searchsorted(ends, row, side="right")
        inside = (row - (ends - counts)[document]) * sequence_length
        size = np.minimum(sequence_length + 1, lengths[document] - inside)
        yield PackedRows(starts[document] + inside, size, np.ones(len(row), np.int64))


def ranges(first: Int64, counts: Int64) -> Int64:
    """Return first[i], first[i] + 1, ... of `counts[i]` int64 [n], one range after another."""
    found: Int64 = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return found
