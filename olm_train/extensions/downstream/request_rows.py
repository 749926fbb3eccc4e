"""Requests in rows: each a document of its own, so that its score is that of it alone.

ids of a request -> inputs, cut from the left where longer than a row
    -> best-fit into rows: dozens of requests in one forward pass
    -> rows dealt to the ranks, as many batches on each
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from olm_data.order.steps import rows_of_tokens
from olm_data.packing.best_fit import Rows, best_fit
from olm_train.data.batch import ROOMS, Batch, check_offsets
from olm_train.distributed.world import World
from olm_train.model.loss import IGNORE_INDEX


class RequestBatch(NamedTuple):
    """Rows of requests.

    Attributes:
        batch: their labels are the continuations; all others are ignored.
        members: int64 [pieces], the request of each piece of the rows; -1: padding.
        offsets: int32 [pieces + 1], where pieces begin, and the end of the last.
    """

    batch: Batch
    members: NDArray[np.int64]
    offsets: NDArray[np.int32]


class RequestRows:
    """Requests in rows, to be read as often as wanted.

    Args:
        tokens: ids of all requests, one behind the other.
        ends: int64 [requests], where each one's ids end.
        context: int64 [requests], tokens of each one's context; at least 1.
        sequence_length: tokens of a row, the longest request that is scored whole.
        microbatch: tokens of a batch of a rank.
        world: the ranks that share the rows.
        packed: False gives each request a row of its own; the scores are the same.

    Attributes:
        requests: how many.
        rows: over all ranks.
        batches: on each rank.
        lost: int64 [requests], tokens that each one's beginning lost.
        cut: bool [requests], whose continuation is not scored as a whole.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        ends: NDArray[np.int64],
        context: NDArray[np.int64],
        sequence_length: int,
        microbatch: int,
        *,
        world: World,
        packed: bool = True,
    ) -> None:
        self._tokens, self._rank, self._length = tokens, world.rank, sequence_length
        sizes = np.diff(ends, prepend=0)
        inputs = sizes - 1  # the last token is only a label
        self.requests = len(ends)
        self.lost = np.maximum(inputs - sequence_length, 0)
        self.cut = context - self.lost < 1
        self._first = ends - sizes + self.lost
        self._inputs = inputs - self.lost
        # the label of input k is token k + 1: the first that is no context's
        self._scored_from = np.maximum(context - self.lost - 1, 0)
        numbers = np.arange(len(inputs), dtype=np.int64)
        self._packed = (
            best_fit(self._inputs, numbers.astype(np.uint64), sequence_length)
            if packed
            else Rows(numbers, np.arange(len(inputs) + 1, dtype=np.int64))
        )
        self._size = rows_of_tokens("rank_microbatch_size", microbatch, sequence_length)
        self.rows = len(self._packed.starts) - 1
        self.batches = -(-self.rows // (self._size * world.size))

    def __iter__(self) -> Iterator[RequestBatch]:
        """Yield the batches of this rank, as many on each."""
        for number in range(self.batches):
            begin = (self._rank * self.batches + number) * self._size
            yield self._batch(range(begin, begin + self._size))

    def _batch(self, rows: range) -> RequestBatch:
        length, tokens = self._length, self._tokens
        shape = (len(rows), length)
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        members, starts = list[int](), list[int]()
        for place, row in enumerate(rows):
            used = 0
            for request in self._requests_of(row):
                size, first = int(self._inputs[request]), int(self._first[request])
                scored = int(self._scored_from[request])
                ids[place, used : used + size] = tokens[first : first + size]
                after = tokens[first + scored + 1 : first + size + 1]
                labels[place, used + scored : used + size] = after
                members.append(request)
                starts.append(place * length + used)
                used += size
            if used < length:
                members.append(-1)
                starts.append(place * length + used)
        offsets = np.array([*starts, ids.size], np.int32)
        check_offsets(offsets, ids.size, length)
        room = next((room for room in ROOMS if room >= len(starts)), len(starts))
        cu_seqlens = np.full(room + 1, ids.size, np.int32)
        cu_seqlens[: len(starts)] = starts
        batch = Batch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            max_seqlen=length,
            rows=torch.tensor([row if row < self.rows else -1 for row in rows]),
        )
        return RequestBatch(batch, np.array(members, np.int64), offsets)

    def _requests_of(self, row: int) -> list[int]:
        if row >= self.rows:
            return []
        low, high = self._packed.starts[row : row + 2]
        found: list[int] = self._packed.order[low:high].tolist()
        return found
