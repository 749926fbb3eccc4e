"""Log-probabilities of the requests of a task: packed into rows, exact over ranks and batches.

    EvalSet -> `RequestRows`: dozens of requests in one forward pass -> losses of labels (the model)
        -> summed by request on the device -> added over the ranks once -> `scoring.score`

The logits are in fp32. A request sees itself alone, so its score does not depend on what shares its
row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olm_data.dataset.eval_set import EvalSet
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.order.steps import rows_of_tokens
from olm_data.packing.best_fit import PiecesByRow, best_fit
from olm_train.data.batch import ROOMS, Batch, check_offsets
from olm_train.distributed.world import World
from olm_train.evaluation.held_out import ByLabel, require_tokenizer
from olm_train.evaluation.scoring import TaskScores, score
from olm_train.model.loss import IGNORE_INDEX, sum_by_piece


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
            else PiecesByRow(numbers, np.arange(len(inputs) + 1, dtype=np.int64))
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
        return self._packed.order[low:high].tolist()


class TaskRequests:
    """The requests of a task in rows, to be scored as often as wanted.

    Args:
        eval_set: of the model's tokenizer, see `open_task`.
        sequence_length: tokens of a row, the longest request that is scored whole.
        microbatch: tokens of a batch of a rank.
        world: the ranks that share the rows; None: this process alone.
        packed: False gives each request a row of its own; the scores are the same.

    Attributes:
        rows: over all ranks.
        truncated: requests whose context lost its beginning.
    """

    def __init__(
        self,
        eval_set: EvalSet,
        sequence_length: int,
        microbatch: int,
        *,
        world: World | None = None,
        packed: bool = True,
    ) -> None:
        self.eval_set, self._world = eval_set, world or World()
        requests = eval_set.requests
        self._rows = RequestRows(
            requests.tokens,
            requests.ends,
            requests.context,
            sequence_length,
            microbatch,
            world=self._world,
            packed=packed,
        )
        self.rows = self._rows.rows
        self.truncated = int((self._rows.lost > 0).sum())

    def measure(
        self, by_label: ByLabel, *, stop: Callable[[], bool] | None = None
    ) -> TaskScores | None:
        """Return the scores of a model; every rank calls it, and takes all of it.

        Args:
            by_label: the model, with logits in fp32.
            stop: asked before each batch, the same answer on every rank: leave off.

        Returns:
            The scores, the same on every rank; None where it was left off.

        Raises:
            UsageError: the losses of labels are not known.
        """
        device = self._world.device
        found: list[tuple[NDArray[np.int64], Tensor]] = []
        for batch, members, offsets in self._rows:
            if stop is not None and stop():
                return None
            losses = by_label(batch)
            if losses is None:
                raise UsageError(
                    "tasks cannot be scored: the train module gives no losses of labels",
                    fix="write its method eval_losses",
                )
            labels = batch.labels.to(device, non_blocking=True)
            pieces = torch.from_numpy(offsets).to(device, non_blocking=True)
            found.append((members, sum_by_piece(losses.flatten(), labels, pieces)[0]))
        nats = np.zeros(self._rows.requests)
        for members, sums in found:
            nats[members[members >= 0]] = sums.cpu().numpy()[members >= 0]
        total = self._world.sum(torch.from_numpy(nats).to(device)).cpu().numpy()
        return score(self.eval_set, -total, self._rows.cut, self.truncated)


def open_task(name: str, folder: str, lock: Lock | None) -> EvalSet:
    """Open the eval set of a task and check that its ids mean what they mean in training.

    Args:
        lock: of the training; None: there is none, and the caller checks.

    Raises:
        InputError: there is no eval set in `folder`.
        ValidationError: it is damaged, or of another tokenizer than the mixture.
    """
    eval_set = EvalSet.open(folder)
    if lock is not None:
        require_tokenizer(eval_set.info.tokenizer, lock, f"the eval set {name!r}", folder)
    return eval_set
