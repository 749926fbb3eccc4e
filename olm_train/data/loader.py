"""Batches of a mixture, the same rows in the same order for any number of ranks.

    lock -> rows of step t: kept rows [before(t), before(t) + G)     G = global batch in rows
         -> rank r of W: the r-th of W equal slices                  who reads, never what is read
         -> micro-batches of `rank_microbatch_size` tokens -> [thread] -> list[Batch] a step
            (each row cut into the shorter ones of its phase, if it has a shorter sequence length)

Of a lock that is still to grow, steps are handed out as far as their rows are there; behind them,
`look` makes or finds the longer lock and `follow` goes on with it, with rows read as ever.

G is one number, or follows a schedule (`schedule_sizes`). The state is the lock's digest
and one integer, counted in rows *handed out*: how far the thread has run ahead never shows.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from olm_data.bounded_json import JsonObject
from olm_data.config.arguments import checked
from olm_data.config.hints import NonNegativeInt, PositiveInt
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Verify
from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.arriving import as_far_as_there, publish_arrived
from olm_data.mixture.lock import Lock
from olm_data.order.steps import (
    Phase,
    Range,
    Steps,
    StepSizes,
    clip_ranges,
    find_phases,
    merge_ranges,
    order_digest,
    phase_of,
    rows_of_tokens,
)
from olm_data.rows.cache_plan import CacheOptions
from olm_data.rows.reader import DatasetRows, RowReader, Windows
from olm_data.tokenization.waiting import Waiting
from olm_train.data.base import DataLoaderBase
from olm_train.data.batch import Batch
from olm_train.data.dealing import Dealing
from olm_train.data.lock_words import describe_lock, lock_difference
from olm_train.data.prefetch import Prefetcher

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How long a look for text that is still to arrive takes, where there is none."""

_EVAL_AHEAD = 2
"""Batches an `EvalLoader` prepares ahead."""


class DataLoader(DataLoaderBase):
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
        dealing: how ranks that read the same slice share its micro-batches; None: none do.

    Attributes:
        step: steps handed out so far.
        steps: whole steps that the schedule holds.
        leftover_rows: rows at the end of the schedule that do not fill a step and are not trained.
        data_wait_seconds: seconds callers have waited for batches (monotonic clock).

    Raises:
        UsageError: sizes that do not divide each other, or a malformed `skip`. A batch size has
            to fit when it is used: `iter` and the trainer look, see `check_sizes`.
        ValidationError: the lock or a dataset is not what its digest says.
    """

    unit = "tokens"
    epochs = 1  # a lock is one pass: its sources have epochs of their own
    lock: Lock

    @checked("skip")
    def __init__(
        self,
        lock: Lock | str | os.PathLike[str],
        *,
        global_batch_size: PositiveInt,
        rank_microbatch_size: PositiveInt,
        rank: NonNegativeInt = 0,
        world_size: PositiveInt = 1,
        prefetch: NonNegativeInt = 2,
        verify: Verify = "lazy",
        device: torch.device | str | None = None,
        skip: Sequence[Sequence[int]] = (),
        cache: CacheOptions | None = None,
        neighbours: range | None = None,
        dealing: Dealing | None = None,
    ) -> None:
        _check_rank(rank, world_size)
        neighbours = range(rank, rank + 1) if neighbours is None else neighbours
        if cache is not None:
            cache = replace(cache, ranks=len(neighbours))
        self._path = None if isinstance(lock, Lock) else os.fspath(lock)
        self._open: Callable[[Lock | str], RowReader] = partial(
            RowReader, verify=verify, cache=cache
        )
        self._waiting: Waiting | None = None
        self._read(self._open(lock if isinstance(lock, Lock) else os.fspath(lock)))
        length = self._reader.sequence_length
        self.rank, self.world_size, self.prefetch = rank, world_size, prefetch
        self._batch_sizes = StepSizes.constant(global_batch_size)
        self.global_batch_size = global_batch_size
        self.rank_microbatch_size = rank_microbatch_size
        self.device = None if device is None else torch.device(device)
        microbatch_rows = rows_of_tokens("rank_microbatch_size", rank_microbatch_size, length)
        self._part = RankSlice(microbatch_rows, rank, world_size, neighbours, dealing)
        self._steps = Steps(self._reader.total_rows, self.batch_sizes.per(length), skip)
        self.step = 0
        self._waited = 0.0
        self._running: Prefetcher[list[Batch]] | None = None
        self._items: Iterator[list[Batch]] = iter(())
        self._turn: object = None  # of the iterator that may hand out steps

    def _read(self, reader: RowReader) -> None:
        self._reader, self.lock = reader, reader.lock
        self._rows_there = self.lock.rows_there()

    @property
    def _steps_there(self) -> int:
        """Steps whose rows are all in shards."""
        return self._steps.sizes.count(self._steps.kept.before(self._rows_there))

    @property
    def awaited(self) -> bool:
        return self._steps_there <= self.step < self.steps

    def look(self) -> tuple[bytes | None, str | None]:
        waiting = self._waiting = self._waiting or Waiting(
            [
                self.lock.location(source.name)
                for index, source in enumerate(self.lock.sources)
                if not self.lock.order.is_complete(index)
            ]
        )
        longer = as_far_as_there(self.lock)
        if longer is self.lock:
            line = waiting.line()
            with self._waits():
                time.sleep(LOOK_SECONDS)
            return None, line
        publish_arrived(longer)
        if self._path is not None:
            longer.write(self._path)
        return longer.encode(), None

    def follow(self, lock: bytes) -> None:
        turn = self._turn
        self.close()
        self._turn = turn  # an iterator goes on
        path = self._path or f"{self.lock.folder}/mixture.lock.json"
        self._read(self._open(Lock.decode(lock, path)))
        self._waiting = None

    @property
    def batch_sizes(self) -> StepSizes:
        """Tokens of each step over all ranks."""
        return self._batch_sizes

    def schedule_sizes(self, sizes: StepSizes) -> None:
        self._steps = Steps(
            self._reader.total_rows, sizes.per(self._reader.sequence_length), self.skip
        )
        self._batch_sizes = sizes
        self.check_sizes(sizes.sizes_from[-1][0])

    @property
    def sequence_length(self) -> int:
        """S, tokens of a row of the schedule: the longest sequence length of the run."""
        return self._reader.sequence_length

    def phases(self) -> list[Phase]:
        """Return the steps of each sequence length, in the order of the run."""
        rows = [stage.rows for stage in self.lock.stages]
        stages = zip(rows, self.lock.sequence_lengths, strict=True)
        return find_phases(stages, self._steps.kept, self._steps.sizes)

    @property
    def steps(self) -> int:
        """Steps the schedule holds in all."""
        return self._steps.count

    @property
    def datasets(self) -> Sequence[Dataset]:
        return self._reader.datasets

    @property
    def leftover_rows(self) -> int:
        """Rows at the end of the schedule that do not fill a step."""
        return self._steps.leftover

    def left_over(self) -> str | None:
        count = self.leftover_rows
        return f"{count:,} rows at the end fill no step and are not trained on" if count else None

    @property
    def skip(self) -> tuple[tuple[int, int], ...]:
        """Ranges of global rows left out, in the past and in the future of this run."""
        return self._steps.kept.skip

    @property
    def data_wait_seconds(self) -> float:
        """Seconds callers have waited for batches so far."""
        return self._waited

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Around a wait of the caller: counts its seconds."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - begun

    def rows_of_step(self, step: int) -> NDArray[np.int64]:
        """Return the global rows int64 [G] of a step over all ranks, in order."""
        return self._steps.rows(step)

    def order_digest(self, step: int) -> str:
        """Return `steps.order_digest` of a step's rows over all ranks, for the log."""
        return order_digest(self.lock.digest, self.rows_of_step(step))

    def check_sizes(self, first: int) -> None:
        """Refuse batch sizes of step `first` or later that these ranks cannot share.

        A size of the past may be one that they could not: the run may have had fewer ranks.

        Raises:
            UsageError: which size, and the nearest that would do.
        """
        unit = self.world_size * self.rank_microbatch_size
        who = f"{self.world_size} ranks"
        if (dealing := self._part.dealing) is not None:
            who = f"{self.world_size} times {dealing.degree} ranks that share them"
        for steps, size in self.batch_sizes.of_one_size(range(first, max(first + 1, self.steps))):
            if size % unit:
                since = f" from step {steps.start + 1:,}" if self.batch_sizes.changes else ""
                low = size // unit * unit
                near = " or ".join(f"{v:,}" for v in (low, low + unit) if v)
                raise UsageError(
                    f"global_batch_size {size:,}{since} does not divide into micro-batches of "
                    f"{self.rank_microbatch_size:,} tokens on {who}",
                    fix=f"set global_batch_size to {near}{since}, or change rank_microbatch_size",
                )

    def __repr__(self) -> str:
        return (
            f"<DataLoader of {self.lock!r}: step {self.step:,} of {self.steps:,}, "
            f"rank {self.rank} of {self.world_size}>"
        )

    def __iter__(self) -> Iterator[list[Batch]]:
        self.close()
        self.check_sizes(self.step)
        self._begin()
        self._turn = object()
        return self._hand_out(self._turn)

    def _begin(self) -> None:
        """Begin to read the steps whose rows are there."""
        self._items = read_steps(
            self._reader,
            self._steps,
            range(self.step, self._steps_there),
            self._part,
            self.phases(),
            pin=self.device is not None and self.device.type == "cuda",
        )
        if self.prefetch:
            self._items = self._running = Prefetcher(self._items, self.prefetch)

    def state_dict(self) -> JsonObject:
        """Return the state after the last step handed out: JSON values only.

        `rows_consumed` counts rows of the schedule, skipped ones included; `lock` says in words
        what the digest stands for, so that a refusal can show what differs.
        """
        last = int(self._steps.rows(self.step - 1)[-1]) if self.step else -1
        return {
            "lock_digest": self.lock.digest,
            "rows_consumed": last + 1,
            "skip": [list(item) for item in self.skip],
            "lock": describe_lock(self.lock),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        """Continue where `state` was taken; a running iterator is closed.

        World size, micro-batch and prefetch may differ from those of the run that wrote it. Ranges
        skipped before that point come from the state, later ones from this loader's `skip`.

        Raises:
            ValidationError: the state belongs to another lock.
            UsageError: `skip` names rows that were trained on, or no step of these batch sizes
                ends where the state was taken.
        """
        if state["lock_digest"] not in self.lock.digests(int(state["rows_consumed"])):
            raise self._another_mixture(state)
        consumed, total = int(state["rows_consumed"]), self._reader.total_rows
        history = clip_ranges(merge_ranges(state["skip"]), 0, consumed)
        for a, b in clip_ranges(self.skip, 0, consumed):
            if not any(x <= a and b <= y for x, y in history):
                raise UsageError(
                    f"skip: rows [{a}, {b}) were already trained on: the checkpoint is at row "
                    f"{consumed:,}",
                    fix="resume from an earlier checkpoint, or remove the range",
                )
        sizes = self._steps.sizes
        steps = Steps(total, sizes, [*history, *clip_ranges(self.skip, consumed, total)])
        done = steps.kept.before(consumed)
        step = sizes.count(done)
        if sizes.before(step) != done:
            raise UsageError(
                f"the checkpoint has consumed {done:,} rows, not a whole number of steps of "
                f"{sizes.size(step):,} rows",
                fix="keep the global_batch_size of the run, or a divisor of it",
            )
        self.close()
        self._steps, self.step = steps, step

    def _another_mixture(self, state: JsonObject) -> ValidationError:
        """Return the error that a state's lock gave other rows than this one."""
        border = {older.digest: older.rows for older in self.lock.extends}.get(state["lock_digest"])
        if border is None:
            return ValidationError(
                "the checkpoint was trained on another mixture",
                where=lock_difference(state.get("lock", {}), describe_lock(self.lock)),
                why="its position means other rows in this lock: tokens would repeat or be lost",
                fix="train with the lock the run was started with, or start a new run",
            )
        steps = self._steps
        last = steps.sizes.count(steps.kept.before(border))
        return ValidationError(
            f"the checkpoint was trained on {int(state['rows_consumed']):,} rows of the older "
            f"mixture, and this lock goes its own way from row {border:,}, after step {last:,}",
            why="rows of the older mixture beyond that are not in this one",
            fix=f"go on from a checkpoint of step {last:,} or before: remove the later ones, or "
            "choose another trainer.save_folder and set trainer.load_path to it; or revise the "
            "older lock at this checkpoint: olm-data mix --revise LOCK --at RUN manifest.yaml",
        )

    def ready(self, seconds: float) -> bool:
        """Wait up to `seconds` for the thread's next step; True where there is no thread."""
        with self._waits():
            return self._running is None or self._running.ready(seconds)

    def leave_out(self, rows: Iterable[Range]) -> None:
        """Add ranges of global rows to `skip`; `load_state_dict` then says where it goes on.

        Raises:
            UsageError: a range is malformed or reaches beyond the schedule.
        """
        self.close()
        skip = [*self.skip, *rows]
        self._steps = Steps(self._reader.total_rows, self._steps.sizes, skip)

    def close(self) -> None:
        """Stop the background thread; the state stays and the loader can be iterated again."""
        self._items, self._turn = iter(()), None
        if self._running is not None:
            self._running.close()
            self._running = None
        if self._reader.remote is not None:
            self._reader.remote.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arrive(self) -> None:
        """Go on to steps that were not there when reading began; wait for them if need be."""
        while self.awaited:  # without a trainer, which waits on all ranks together
            lock, line = self.look()
            if line is not None:
                log.warning("%s", line)
            if lock is not None:
                self.follow(lock)
        self._begin()

    def _hand_out(self, turn: object) -> Iterator[list[Batch]]:
        while True:
            if turn is not self._turn:
                raise RuntimeError(
                    "this iterator ended when its loader was closed or iterated anew"
                )
            if self.step >= self.steps:
                break
            with self._waits():
                batches = next(self._items, None)
            if batches is None:
                self._arrive()
                continue
            if self.device is not None:
                batches = [batch.to(self.device) for batch in batches]
            self.step += 1
            yield batches
        if self.rank == 0 and (rest := self.left_over()):
            log.warning("the schedule ended after %d steps; %s", self.steps, rest)


class EvalLoader:
    """One pass over a dataset, row by row, for evaluation: each token is a label exactly once.

    The first token of a document is predicted after the BOS or else the EOS of the dataset, and is
    no label where it has neither.

    Rows are dealt to the ranks in contiguous slices. Every rank has the same number of batches, all
    of the same shape: what is missing is padding with labels -100.

    Args:
        dataset: path of the dataset, or an open one.
        sequence_length: S.
        rank_microbatch_size: tokens of one batch of one rank.
        rank, world_size: which of how many slices this process reads.

    Raises:
        UsageError: the micro-batch is no multiple of S.
        ValidationError: the dataset is damaged.
    """

    @checked()
    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        sequence_length: PositiveInt,
        rank_microbatch_size: PositiveInt,
        *,
        rank: NonNegativeInt = 0,
        world_size: PositiveInt = 1,
    ) -> None:
        _check_rank(rank, world_size)
        if not isinstance(dataset, Dataset):
            dataset = Dataset.open(os.fspath(dataset))
        eos = dataset.manifest.tokenizer.eos_begins
        self.dataset, self._rows = dataset, DatasetRows(dataset, sequence_length, eos)
        self._size = rows_of_tokens("rank_microbatch_size", rank_microbatch_size, sequence_length)
        self._running: Prefetcher[Batch] | None = None
        self._batches = math.ceil(self._rows.total_rows / (self._size * world_size))
        self._first = rank * self._batches * self._size

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        rows, size, stop = self._rows, self._size, self._first + self._batches * self._size
        firsts = range(self._first, stop, size)
        batches = (Batch.from_rows(rows.read(np.arange(at, at + size))) for at in firsts)
        self._running = Prefetcher(batches, _EVAL_AHEAD)
        return self._running

    def close(self) -> None:
        """Stop the background thread; the loader can be iterated again."""
        if self._running is not None:
            self._running.close()
            self._running = None


# The background thread runs `read_steps`, or the generator above. They hold what they read from,
# and never the loader: a loader nobody holds is collected, and its thread ends.


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} does not exist among {world_size} ranks")


_LOCATED_AHEAD = 8192
"""Rows located at once, so that computing the order costs nothing a batch."""

_FORESEEN = 1 << 16
"""Rows of this machine whose shards are known beyond those located."""


@dataclass(frozen=True)
class RankSlice:
    """Which rows of a step one rank reads, and in what pieces.

    Attributes:
        microbatch_rows: rows of a micro-batch.
        rank, world_size: it reads the rank-th of so many equal parts of each step.
        neighbours: which parts the ranks of its machine read.
        dealing: how several ranks share a micro-batch.
    """

    microbatch_rows: int
    rank: int
    world_size: int
    neighbours: range
    dealing: Dealing | None = None


def read_steps(
    reader: RowReader,
    schedule: Steps,
    steps: range,
    part: RankSlice,
    phases: Sequence[Phase],
    *,
    pin: bool,
) -> Iterator[list[Batch]]:
    """Read the micro-batches of one rank for each of `steps`."""
    size = part.microbatch_rows
    weights = np.array(reader.lock.loss_weights, np.int32)

    def batch(windows: Windows, i: int, parts: int) -> Batch:
        own = weights[windows.source[i : i + size]].repeat(parts) if weights.size else None
        return Batch.from_rows(windows.read(i, i + size, parts), own)

    for chunk, per_rank in _chunks(schedule.sizes, steps, part.world_size):
        ranks = range(part.rank, part.rank + 1)
        windows = reader.prepare(_rows_of_ranks(schedule, chunk, ranks, part.world_size)[1])
        if reader.remote is not None:
            _prefetch(reader, schedule, chunk, steps.stop, part)
        for step, begin in zip(chunk, range(0, len(windows), per_rank), strict=True):
            if reader.remote is not None:
                reader.remote.reached(step)
            parts = reader.sequence_length // phase_of(phases, step).sequence_length
            batches = [batch(windows, i, parts) for i in range(begin, begin + per_rank, size)]
            if part.dealing is not None:
                batches = [part.dealing(batch) for batch in batches]
            yield [batch.pin_memory() for batch in batches] if pin else batches


def _chunks(sizes: StepSizes, steps: range, world_size: int) -> Iterator[tuple[range, int]]:
    """Yield the steps located at once, which have one size, and the rows of a rank in each."""
    for some, step_rows in sizes.of_one_size(steps):
        per_rank = step_rows // world_size
        ahead = max(1, _LOCATED_AHEAD // per_rank)
        for first in range(some.start, some.stop, ahead):
            yield range(first, min(first + ahead, some.stop)), per_rank


def _rows_of_ranks(
    schedule: Steps, steps: range, ranks: range, world_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the step int64 [m], and the global row int64 [m], of all rows of some ranks."""
    numbers, kept = [], []
    for some, step_rows in schedule.sizes.of_one_size(steps):
        per_rank = step_rows // world_size
        rows = np.arange(ranks.start * per_rank, ranks.stop * per_rank, dtype=np.int64)
        first = schedule.sizes.before(some.start)
        begins = first + np.arange(len(some), dtype=np.int64) * step_rows
        # [steps, 1] + [rows of the ranks] -> [steps * rows of the ranks]
        kept.append((begins[:, None] + rows).reshape(-1))
        numbers.append(np.repeat(np.arange(some.start, some.stop), len(rows)))
    return np.concatenate(numbers), schedule.kept.rows(np.concatenate(kept))


def _prefetch(reader: RowReader, schedule: Steps, chunk: range, stop: int, part: RankSlice) -> None:
    """Tell the reader which rows all ranks of this machine need in the steps of `chunk` and on.

    The look ahead goes on behind these steps, so that what they do not need is fetched in time.
    """
    sizes, ranks = schedule.sizes, part.neighbours
    beyond = sizes.before(chunk.stop) + _FORESEEN * part.world_size // len(ranks)
    end = min(stop, max(chunk.stop + 1, sizes.count(beyond)))
    reader.prefetch(*_rows_of_ranks(schedule, range(chunk.start, end), ranks, part.world_size))
