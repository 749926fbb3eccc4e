"""Batches of a mixture, the same rows in the same order for any number of ranks.

    lock -> rows of step t: kept rows [t * G, (t + 1) * G)           G = global batch in rows
         -> rank r of W: the r-th of W equal slices                  who reads, never what is read
         -> micro-batches of `rank_microbatch_size` tokens -> [thread] -> list[Batch] a step
            (each row cut into the shorter ones of its phase, if it has a shorter sequence length)

The state is the lock's digest and one integer, counted in rows *handed out*: how far the thread has
run ahead never shows. Never: worker processes, a clock or a random number, an epoch boundary.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Verify
from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.mixture.phases import Phase, find_phases, phase_of
from olm_data.mixture.skip import KeptRows, Range, clip_ranges, merge_ranges
from olm_data.mixture.steps import order_digest, rows_of_tokens
from olm_data.rows.cache_plan import CacheOptions
from olm_data.rows.reader import DatasetRows, RowReader
from olm_train.data.batch import Batch
from olm_train.data.lock_words import describe_lock, lock_difference
from olm_train.data.prefetch import Prefetcher

log = logging.getLogger(__name__)

_LOCATED_AHEAD = 8192
"""Rows located at once, so that computing the order costs nothing a batch."""

_FORESEEN = 1 << 16
"""Rows of this machine whose shards are known beyond those located."""

_EVAL_AHEAD = 2
"""Batches an `EvalLoader` prepares ahead."""


class DataLoader:
    """Iterates over the steps of a mixture lock: each item is this rank's list of micro-batches.

    Sizes are in tokens. The loader continues from its state: a second `iter` goes on after the last
    step handed out.

    Args:
        lock: path of `mixture.lock.json`, or a `Lock`.
        global_batch_size: tokens of one step over all ranks.
        rank_microbatch_size: tokens of one micro-batch of one rank.
        rank, world_size: which of how many slices this process reads.
        prefetch: steps prepared ahead by a background thread; 0 reads in the caller's thread.
        verify: `off` | `lazy` | `full`, see `olm_data.rows.reader.RowReader`.
        device: where batches end up; on CUDA they are pinned by the thread and copied without
            blocking. None leaves them on the CPU.
        skip: ranges [first, one past the last] of global rows that are left out.
        cache: where whole shards of remote datasets go; None: remote rows are read one by one.
        neighbours: the ranks of this machine, which share the cache; default: this one.

    Attributes:
        step: steps handed out so far.
        steps: steps the schedule holds, floor(kept rows / rows of a step).
        leftover_rows: rows at the end of the schedule that do not fill a step and are not trained.
        data_wait_seconds: seconds callers have waited for batches (monotonic clock).

    Raises:
        UsageError: sizes that do not divide each other, or a malformed `skip`.
        ValidationError: the lock or a dataset is not what its digest says.
    """

    def __init__(
        self,
        lock: Lock | str | os.PathLike[str],
        *,
        global_batch_size: int,
        rank_microbatch_size: int,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 2,
        verify: Verify = "lazy",
        device: torch.device | str | None = None,
        skip: Sequence[Sequence[int]] = (),
        cache: CacheOptions | None = None,
        neighbours: range | None = None,
    ) -> None:
        _check_rank(rank, world_size)
        if prefetch < 0:
            raise UsageError(f"prefetch must be 0 or more steps, not {prefetch}")
        self._neighbours = range(rank, rank + 1) if neighbours is None else neighbours
        if cache is not None:
            cache = replace(cache, ranks=len(self._neighbours))
        self._reader = RowReader(lock, verify=verify, cache=cache)
        self.lock = self._reader.lock
        length = self._reader.sequence_length
        self.rank, self.world_size, self.prefetch = rank, world_size, prefetch
        self.global_batch_size, self.rank_microbatch_size = global_batch_size, rank_microbatch_size
        self.device = None if device is None else torch.device(device)
        self._microbatch_rows = rows_of_tokens("rank_microbatch_size", rank_microbatch_size, length)
        self._step_rows = rows_of_tokens("global_batch_size", global_batch_size, length)
        unit = world_size * self._microbatch_rows
        if self._step_rows % unit:
            low = self._step_rows // unit * unit * length
            near = " or ".join(f"{v:,}" for v in (low, low + unit * length) if v)
            raise UsageError(
                f"global_batch_size {global_batch_size:,} does not divide into micro-batches of "
                f"{rank_microbatch_size:,} tokens on {world_size} ranks",
                fix=f"set global_batch_size to {near}, or change rank_microbatch_size",
            )
        self._kept = KeptRows(self._reader.total_rows, skip)
        self.step = 0
        self._waited = 0.0
        self._running: Prefetcher[list[Batch]] | None = None
        self._items: Iterator[list[Batch]] | None = None  # the iterator that may hand out steps

    @property
    def sequence_length(self) -> int:
        """S, tokens of a row of the schedule: the longest sequence length of the run."""
        return self._reader.sequence_length

    def phases(self) -> list[Phase]:
        """Return the steps of each sequence length, in the order of the run."""
        return find_phases(self.lock, self._kept, self._step_rows)

    @property
    def steps(self) -> int:
        """Steps the schedule holds in all."""
        return self._kept.count // self._step_rows

    @property
    def leftover_rows(self) -> int:
        """Rows at the end of the schedule that do not fill a step."""
        return self._kept.count % self._step_rows

    @property
    def skip(self) -> tuple[tuple[int, int], ...]:
        """Ranges of global rows left out, in the past and in the future of this run."""
        return self._kept.skip

    @property
    def data_wait_seconds(self) -> float:
        """Seconds callers have waited for batches so far."""
        return self._waited + (self._running.wait_seconds if self._running else 0.0)

    def rows_of_step(self, step: int) -> NDArray[np.int64]:
        """Return the global rows int64 [G] of a step over all ranks, in order."""
        first = step * self._step_rows
        return self._kept.rows(np.arange(first, first + self._step_rows, dtype=np.int64))

    def order_digest(self, step: int) -> str:
        """Return `steps.order_digest` of a step's rows over all ranks, for the log."""
        return order_digest(self.lock.digest, self.rows_of_step(step))

    def __iter__(self) -> Iterator[list[Batch]]:
        self.close()
        items = _read_steps(
            self._reader,
            self._kept,
            range(self.step, self.steps),
            _Slice(
                self._step_rows,
                self._microbatch_rows,
                self.rank,
                self.world_size,
                self._neighbours,
            ),
            self.phases(),
            pin=self.device is not None and self.device.type == "cuda",
        )
        if self.prefetch:
            items = self._running = Prefetcher(items, self.prefetch)
        else:
            items = self._timed(items)
        self._items = items
        return self._hand_out(items)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step handed out: JSON values only.

        `rows_consumed` counts rows of the schedule, skipped ones included; `lock` says in words
        what the digest stands for, so that a refusal can show what differs.
        """
        kept = self.step * self._step_rows
        last = int(self._kept.rows(np.array([kept - 1]))[0]) if kept else -1
        return {
            "lock_digest": self.lock.digest,
            "rows_consumed": last + 1,
            "skip": [list(item) for item in self.skip],
            "lock": describe_lock(self.lock),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; a running iterator is closed.

        World size, micro-batch and prefetch may differ from those of the run that wrote it. Ranges
        skipped before that point come from the state, later ones from this loader's `skip`.

        Raises:
            ValidationError: the state belongs to another lock.
            UsageError: `skip` names rows that were trained on, or the global batch size changed to
                one that the consumed rows are no multiple of.
        """
        older = [lock.digest for lock in self.lock.extends]  # their rows are the first of ours
        if state["lock_digest"] not in (self.lock.digest, *older):
            raise ValidationError(
                "the checkpoint was trained on another mixture",
                where=lock_difference(state.get("lock", {}), describe_lock(self.lock)),
                why="its position means other rows in this lock: tokens would repeat or be lost",
                fix="train with the lock the run was started with, or start a new run",
            )
        consumed, total = int(state["rows_consumed"]), self._reader.total_rows
        history = clip_ranges(merge_ranges(state["skip"]), 0, consumed)
        for a, b in clip_ranges(self.skip, 0, consumed):
            if not any(x <= a and b <= y for x, y in history):
                raise UsageError(
                    f"skip: rows [{a}, {b}) were already trained on: the checkpoint is at row "
                    f"{consumed:,}",
                    fix="resume from an earlier checkpoint, or remove the range",
                )
        kept = KeptRows(total, [*history, *clip_ranges(self.skip, consumed, total)])
        step, rest = divmod(kept.before(consumed), self._step_rows)
        if rest:
            raise UsageError(
                f"the checkpoint has consumed {kept.before(consumed):,} rows, which is no whole "
                f"number of steps of {self._step_rows:,} rows",
                fix="keep the global_batch_size of the run, or a divisor of it",
            )
        self.close()
        self._kept, self.step = kept, step

    def leave_out(self, rows: Iterable[Range]) -> None:
        """Add ranges of global rows to `skip`; `load_state_dict` then says where it goes on.

        Raises:
            UsageError: a range is malformed or reaches beyond the schedule.
        """
        self.close()
        self._kept = KeptRows(self._reader.total_rows, [*self.skip, *rows])

    def close(self) -> None:
        """Stop the background thread; the state stays and the loader can be iterated again."""
        self._items = None
        if self._running is not None:
            self._running.close()
            self._waited += self._running.wait_seconds
            self._running = None
        if self._reader.remote is not None:
            self._reader.remote.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_out(self, items: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        for batches in items:
            if items is not self._items:
                raise RuntimeError(
                    "this iterator ended when its loader was closed or iterated anew"
                )
            if self.device is not None:
                batches = [batch.to(self.device) for batch in batches]
            self.step += 1
            yield batches
        if self.leftover_rows and self.rank == 0:
            log.warning(
                "the schedule ended after %d steps; %d rows were left over, fewer than a step's %d",
                self.steps,
                self.leftover_rows,
                self._step_rows,
            )

    def _timed(self, items: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Pass items on and count the seconds spent waiting for them."""
        while True:
            begun = time.perf_counter()
            batches = next(items, None)
            self._waited += time.perf_counter() - begun
            if batches is None:
                return
            yield batches


class EvalLoader:
    """One pass over a dataset, row by row, for evaluation: each token is a label exactly once.

    Rows are dealt to the ranks in contiguous slices. Every rank has the same number of batches, all
    of the same shape: what is missing is padding with labels -100.

    Args:
        dataset: path of the dataset, or an open one.
        sequence_length: S.
        rank_microbatch_size: tokens of one batch of one rank.
        rank, world_size: which of how many slices this process reads.
        verify: `off` | `lazy` | `full`, for a path.

    Raises:
        UsageError: the micro-batch is no multiple of S.
        ValidationError: the dataset is damaged.
    """

    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        sequence_length: int,
        rank_microbatch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        verify: Verify = "lazy",
    ) -> None:
        _check_rank(rank, world_size)
        if not isinstance(dataset, Dataset):
            dataset = Dataset.open(os.fspath(dataset), verify=verify)
        self.dataset, self._rows = dataset, DatasetRows(dataset, sequence_length)
        self._size = rows_of_tokens("rank_microbatch_size", rank_microbatch_size, sequence_length)
        self._running: Prefetcher[Batch] | None = None
        self._batches = math.ceil(self._rows.total_rows / (self._size * world_size))
        self._first = rank * self._batches * self._size

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._running = Prefetcher(
            _read_evaluation(self._rows, self._first, self._size, self._batches), _EVAL_AHEAD
        )
        return self._running

    def close(self) -> None:
        """Stop the background thread; the loader can be iterated again."""
        if self._running is not None:
            self._running.close()
            self._running = None


@dataclass(frozen=True)
class _Slice:
    """Which rows of a step one rank reads, and in what pieces; all in rows."""

    step_rows: int
    microbatch_rows: int
    rank: int
    world_size: int
    neighbours: range


# The background thread runs the two generators below. They hold what they read from, and never the
# loader: a loader nobody holds is collected, and its thread ends.


def _read_steps(
    reader: RowReader,
    kept: KeptRows,
    steps: range,
    part: _Slice,
    phases: Sequence[Phase],
    *,
    pin: bool,
) -> Iterator[list[Batch]]:
    """Read the micro-batches of one rank for each of `steps`."""
    per_rank, size = part.step_rows // part.world_size, part.microbatch_rows
    ahead = max(1, _LOCATED_AHEAD // per_rank)
    mine = part.rank * per_rank + np.arange(per_rank, dtype=np.int64)
    for chunk in range(steps.start, steps.stop, ahead):
        first = np.arange(chunk, min(chunk + ahead, steps.stop)) * part.step_rows
        # [steps, 1] + [rows of the rank] -> [steps * rows of the rank]
        windows = reader.prepare(kept.rows((first[:, None] + mine).reshape(-1)))
        if reader.remote is not None:
            _foresee(reader, kept, range(chunk, steps.stop), ahead, part)
        for begin in range(0, len(windows), per_rank):
            if reader.remote is not None:
                reader.remote.reached(chunk + begin // per_rank)
            phase = phase_of(phases, chunk + begin // per_rank)
            parts = reader.sequence_length // phase.sequence_length
            batches = [
                Batch.from_rows(windows.read(i, i + size, parts))
                for i in range(begin, begin + per_rank, size)
            ]
            yield [batch.pin_memory() for batch in batches] if pin else batches


def _foresee(reader: RowReader, kept: KeptRows, steps: range, ahead: int, part: _Slice) -> None:
    """Tell the reader which rows all ranks of this machine need in the next `ahead` steps and on.

    The look ahead goes on behind these steps, so that what they do not need is fetched in time.
    """
    per_rank = part.step_rows // part.world_size
    rows = per_rank * len(part.neighbours)
    ahead += max(1, _FORESEEN // rows)
    near = np.arange(steps.start, min(steps.stop, steps.start + ahead), dtype=np.int64)
    ours = part.neighbours.start * per_rank + np.arange(rows, dtype=np.int64)
    # [steps, 1] + [rows of the machine] -> [steps * rows of the machine]
    foreseen = kept.rows((near[:, None] * part.step_rows + ours).reshape(-1))
    reader.foresee(np.repeat(near, rows), foreseen)


def _read_evaluation(rows: DatasetRows, first: int, size: int, count: int) -> Iterator[Batch]:
    """Read `count` batches of `size` rows from row `first` on."""
    for begin in range(first, first + count * size, size):
        yield Batch.from_rows(rows.read(np.arange(begin, begin + size)))


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} does not exist among {world_size} ranks")
