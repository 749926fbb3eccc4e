"""The rows of one rank, step by step: located in order many steps at once, read when they are due.

    Steps, rank -> chunks of steps of one size -> RowReader.prepare -> micro-batches of each step
                                      `-> RowReader.prefetch: what this machine needs next

Runs in the loader's background thread. Never: hold the loader, or decide what a step is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olm_data.order.phases import Phase, phase_of
from olm_data.order.steps import Steps, StepSizes
from olm_data.rows.reader import RowReader
from olm_train.data.batch import Batch

_LOCATED_AHEAD = 8192
"""Rows located at once, so that computing the order costs nothing a batch."""

_FORESEEN = 1 << 16
"""Rows of this machine whose shards are known beyond those located."""


@dataclass(frozen=True)
class Slice:
    """Which rows of a step one rank reads, and in what pieces.

    Attributes:
        microbatch_rows: rows of a micro-batch.
        rank, world_size: it reads the rank-th of so many equal parts of each step.
        neighbours: the ranks of its machine.
    """

    microbatch_rows: int
    rank: int
    world_size: int
    neighbours: range


def read_steps(
    reader: RowReader,
    schedule: Steps,
    steps: range,
    part: Slice,
    phases: Sequence[Phase],
    *,
    pin: bool,
) -> Iterator[list[Batch]]:
    """Read the micro-batches of one rank for each of `steps`."""
    size = part.microbatch_rows
    for chunk, per_rank in _chunks(schedule.sizes, steps, part.world_size):
        ranks = range(part.rank, part.rank + 1)
        windows = reader.prepare(_rows_of_ranks(schedule, chunk, ranks, part.world_size)[1])
        if reader.remote is not None:
            _prefetch(reader, schedule, chunk, steps.stop, part)
        for step, begin in zip(chunk, range(0, len(windows), per_rank), strict=True):
            if reader.remote is not None:
                reader.remote.reached(step)
            parts = reader.sequence_length // phase_of(phases, step).sequence_length
            batches = [
                Batch.from_rows(windows.read(i, i + size, parts))
                for i in range(begin, begin + per_rank, size)
            ]
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


def _prefetch(reader: RowReader, schedule: Steps, chunk: range, stop: int, part: Slice) -> None:
    """Tell the reader which rows all ranks of this machine need in the steps of `chunk` and on.

    The look ahead goes on behind these steps, so that what they do not need is fetched in time.
    """
    sizes, ranks = schedule.sizes, part.neighbours
    beyond = sizes.before(chunk.stop) + _FORESEEN * part.world_size // len(ranks)
    end = min(stop, max(chunk.stop + 1, sizes.count(beyond)))
    reader.prefetch(*_rows_of_ranks(schedule, range(chunk.start, end), ranks, part.world_size))
