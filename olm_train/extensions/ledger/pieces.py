"""Where the pieces of documents in trained rows come from: their addresses, many at a time.

    rows of the run, where pieces begin in them -> source, epoch, document, tokens [start, stop)

The same answers as `views.LockRows`, by array: no token, no text and no provenance is read, only
the document ends of the shards that the rows lie in, which whoever read the rows has verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from olm_data.dataset.dataset import Dataset
from olm_data.mixture.lock import Lock
from olm_data.packing.concat import StreamRows
from olm_data.packing.row_plan import RowPlan
from olm_data.storage.store import is_remote

Int64 = NDArray[np.int64]
MAX_REMOTE = 64
"""Shards of a remote dataset whose document ends are held in memory."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces of documents; arrays of [pieces].

    Attributes:
        row: row of the run.
        source: index into the lock's sources.
        epoch: how often the source was gone through before, from 0.
        shard: number of the shard in the source's dataset.
        document: number of the document there.
        start, stop: tokens of the document, [start, stop).
    """

    row: Int64
    source: NDArray[Any]
    epoch: Int64
    shard: Int64
    document: Int64
    start: Int64
    stop: Int64


class PieceAddresses:
    """Says of which documents trained rows are made; opens each source when it is first met.

    Args:
        lock: of the run.
    """

    def __init__(self, lock: Lock) -> None:
        self.lock, self._schedule = lock, lock.schedule()
        self._sources: dict[int, tuple[Dataset, RowPlan | StreamRows]] = {}

    def of(self, rows: Int64, begin: Int64, size: Int64) -> Pieces:
        """Return the addresses of the pieces of some rows.

        Args:
            rows: int64 [m], rows of the run, laid one behind the other, each `sequence_length` of
                the lock long.
            begin, size: int64 [pieces], where in them each piece begins, and its tokens with those
                that pad the row. Pieces that are padding alone have no address.
        """
        which, offset = np.divmod(begin, self.lock.sequence_length)
        origin = self._schedule.locate(rows)
        source = origin.source[which]
        shard, document, start, stop = (np.zeros(len(begin), np.int64) for _ in range(4))
        for index in np.unique(source).tolist():
            mine = np.flatnonzero(source == index)
            dataset, plan = self._source(index)
            token = _tokens(plan, origin.row[which[mine]], offset[mine])
            shard[mine], document[mine], start[mine], stop[mine] = _documents(dataset, token)
        # what pads a row counts to its last piece
        stop = np.minimum(stop, start + size)
        return Pieces(
            row=rows[which],
            source=source,
            epoch=origin.epoch[which],
            shard=shard,
            document=document,
            start=start,
            stop=stop,
        )

    def source_names(self, pieces: Pieces) -> list[str]:
        """Return the name of each piece's source."""
        names = np.array([source.name for source in self.lock.sources], object)
        found: list[str] = names[pieces.source].tolist()
        return found

    def shard_names(self, pieces: Pieces) -> list[str]:
        """Return the name of each piece's shard."""
        found = np.empty(len(pieces.row), object)
        for index in np.unique(pieces.source).tolist():
            mine = pieces.source == index
            shards = self._source(index)[0].manifest.shards
            used, inverse = np.unique(pieces.shard[mine], return_inverse=True)
            found[mine] = np.array([shards[n].name for n in used.tolist()], object)[inverse]
        names: list[str] = found.tolist()
        return names

    def _source(self, index: int) -> tuple[Dataset, RowPlan | StreamRows]:
        if index not in self._sources:
            remote = is_remote(self.lock.location(self.lock.sources[index].name))
            most = MAX_REMOTE if remote else None
            dataset = self.lock.open_dataset(index, verify="off", max_open=most)
            self._sources[index] = dataset, self.lock.open_rows(index, verify="off")
        return self._sources[index]


def _tokens(plan: RowPlan | StreamRows, row: Int64, offset: Int64) -> Int64:
    """Return which token of the dataset stands at an offset of each row, int64 [pieces]."""
    if isinstance(plan, StreamRows):
        return row * plan.sequence_length + offset
    token = np.zeros(len(row), np.int64)
    for number in np.unique(row).tolist():
        mine = row == number
        starts, sizes = np.array(plan.pieces(number), np.int64).T
        ends = np.cumsum(sizes)
        piece = np.searchsorted(ends, offset[mine], side="right")
        token[mine] = starts[piece] + offset[mine] - (ends - sizes)[piece]
    return token


def _documents(dataset: Dataset, token: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Return shard, document, position in the document, and the document's length, of tokens."""
    shard = np.searchsorted(dataset.token_ends, token, side="right")
    document, position, length = (np.zeros(len(token), np.int64) for _ in range(3))
    for index in np.unique(shard).tolist():
        mine, info = shard == index, dataset.manifest.shards[index]
        ends = dataset.shard(index).ends
        local = token[mine] - (int(dataset.token_ends[index]) - info.tokens)
        number = np.searchsorted(ends, local.astype(np.uint64), side="right")
        before = np.where(number > 0, ends[np.maximum(number, 1) - 1], 0).astype(np.int64)
        document[mine] = number + int(dataset.document_ends[index]) - info.documents
        position[mine] = local - before
        length[mine] = ends[number].astype(np.int64) - before
    return shard, document, position, length
