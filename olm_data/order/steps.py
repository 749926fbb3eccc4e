"""Which rows a step, a rank and a micro-batch are made of, and back. Pure.

    step -> StepSizes: kept rows [before, before + G) -> rank r: the r-th of W equal slices
                                                      -> micro-batches of b rows, one after another

G, W and b decide who reads when, never what stands where in the order. G is one number for a whole
run, or follows a schedule of batch sizes. Steps count from 0 here; logs and commands count them
from 1.

Also: the rows of a schedule that are trained on: all but the skipped ranges. Pure.

Also: sequence-length phases: which steps of a run see rows of which length. Pure.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from olm_data.errors import UsageError

Range = tuple[int, int]


def merge_ranges(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """Return half-open ranges [a, b) sorted, without overlaps or neighbours that touch.

    Raises:
        UsageError: a range is not two integers 0 <= a < b.
    """
    merged: list[Range] = []
    checked = [_check(item) for item in ranges]
    for a, b in sorted(checked):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return tuple(merged)


def clip_ranges(ranges: Iterable[Range], start: int, stop: int) -> tuple[Range, ...]:
    """Return the parts of `ranges` inside [start, stop)."""
    clipped = ((max(a, start), min(b, stop)) for a, b in ranges)
    return tuple((a, b) for a, b in clipped if a < b)


class KeptRows:
    """The rows 0 .. total_rows - 1 without the skipped ones.

    Args:
        total_rows: rows of the schedule.
        skip: half-open ranges of global rows.

    Attributes:
        skip: the ranges, sorted and merged.
        count: kept rows.

    Raises:
        UsageError: a range is malformed or reaches beyond the schedule.
    """

    def __init__(self, total_rows: int, skip: Iterable[Sequence[int]] = ()) -> None:
        self.skip = merge_ranges(skip)
        if self.skip and self.skip[-1][1] > total_rows:
            raise UsageError(
                f"skip: [{self.skip[-1][0]}, {self.skip[-1][1]}] reaches beyond the schedule of "
                f"{total_rows:,} rows",
                fix="give ranges of global row numbers [first, one past the last]",
            )
        bounds = np.array(self.skip, dtype=np.int64).reshape(-1, 2)
        self._starts, self._ends = bounds[:, 0], bounds[:, 1]
        self._skipped_before = np.append(0, np.cumsum(bounds[:, 1] - bounds[:, 0]))
        # kept index at which each skipped range stands
        self._kept_at = self._starts - self._skipped_before[:-1]
        self.count = total_rows - int(self._skipped_before[-1])

    def rows(self, kept: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the global rows int64 [m] of kept indices int64 [m]."""
        passed = np.searchsorted(self._kept_at, kept, side="right")
        result: NDArray[np.int64] = kept + self._skipped_before[passed]
        return result

    def index(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the kept index int64 [m] of global rows int64 [m]; -1 for a skipped row."""
        begun = np.searchsorted(self._starts, rows, side="right")
        kept = rows - self._skipped_before[begun]
        ends = np.append(0, self._ends)  # where the last range that has begun ends
        return np.where(rows < ends[begun], -1, kept)

    def before(self, row: int) -> int:
        """Return how many kept rows there are below a global row."""
        return row - sum(b - a for a, b in clip_ranges(self.skip, 0, row))


def _check(item: Sequence[int]) -> Range:
    if (
        isinstance(item, str)
        or len(item) != 2
        or not all(isinstance(v, int) and not isinstance(v, bool) for v in item)
        or not 0 <= item[0] < item[1]
    ):
        raise UsageError(
            f"skip: {item!r} is not a range of rows",
            fix="write [first, one past the last], for example skip: [[4096, 8192]].",
        )
    return item[0], item[1]


SKIPPED, LEFT_OVER = -1, -2
"""Instead of a step: the row is skipped, or at the end of the schedule in no whole step."""


def order_digest(lock_digest: str, rows: NDArray[np.int64]) -> str:
    """Return the digest that a run logs for a step.

    The sha256 of the lock's digest (its 64 hexadecimal digits) and of the step's global rows over
    all ranks, in order, as little-endian int64. It depends on the lock, the global batch size and
    the skipped rows alone.
    """
    return hashlib.sha256(lock_digest.encode() + rows.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class StepSizes:
    """How much each step of a run holds: one size, or a few, one after another.

    Counts rows or tokens, whatever its sizes are in; `per(S)` turns tokens into rows.

    Attributes:
        sizes_from: (first step from 0, size of it and the steps after it), ascending, no two
            neighbours of one size.

    Raises:
        UsageError: a size below 1, or steps that are not in order.
    """

    sizes_from: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        firsts, sizes = [step for step, _ in self.sizes_from], [size for _, size in self.sizes_from]
        if min(sizes, default=0) < 1:
            raise UsageError(
                f"a step of {min(sizes, default=0)} rows or tokens", fix="give a step one or more"
            )
        if firsts[0] != 0 or any(a >= b for a, b in pairwise(firsts)):
            raise UsageError(
                "the changes of the batch size are not one after another: they come to steps "
                + ", ".join(f"{step + 1:,}" for step in firsts),
                fix="order the schedule, and leave at least one step between two changes",
            )
        different = tuple(
            entry for n, entry in enumerate(self.sizes_from) if not n or entry[1] != sizes[n - 1]
        )
        object.__setattr__(self, "sizes_from", different)

    @classmethod
    def constant(cls, size: int) -> StepSizes:
        """Return steps of one size."""
        return cls(((0, size),))

    def then(self, first: int, size: int) -> StepSizes:
        """Return these sizes up to step `first`, counted from 0, and `size` from there on.

        Raises:
            UsageError: a size below 1, or a step that is not after those of the last change.
        """
        return StepSizes((*self.sizes_from, (first, size)))

    @property
    def changes(self) -> tuple[tuple[int, int], ...]:
        """The sizes after the first one: (first step that has it, counted from 1, size).

        A checkpoint and `starts.jsonl` hold `size(0)` and these; `recorded` reads them.
        """
        return tuple((first + 1, size) for first, size in self.sizes_from[1:])

    @classmethod
    def recorded(cls, size: int, changes: Iterable[Sequence[int]]) -> StepSizes:
        """Return the sizes that begin with `size` and have these `changes`."""
        return cls(((0, size), *((step - 1, then) for step, then in changes)))

    @cached_property
    def _firsts(self) -> list[int]:
        return [step for step, _ in self.sizes_from]

    @cached_property
    def _befores(self) -> list[int]:
        """What the steps before each of `sizes_from` hold together."""
        befores = [0]
        for (first, size), (stop, _) in pairwise(self.sizes_from):
            befores.append(befores[-1] + (stop - first) * size)
        return befores

    def size(self, step: int) -> int:
        """Return how much step `step` holds."""
        return self.sizes_from[bisect_right(self._firsts, step) - 1][1]

    def growth(self, step: int) -> float:
        """Return the size of step `step` over that of the first one."""
        return self.size(step) / self.size(0)

    def before(self, step: int) -> int:
        """Return how much the steps before `step` hold together."""
        at = bisect_right(self._firsts, step) - 1
        first, size = self.sizes_from[at]
        return self._befores[at] + (step - first) * size

    def steps_to(self, amount: int) -> int:
        """Return the fewest first steps that hold `amount` or more together.

        That is also the first step that begins at or after `amount`.
        """
        at = max(0, bisect_left(self._befores, amount) - 1)
        first, size = self.sizes_from[at]
        return first - (self._befores[at] - max(amount, 0)) // size

    def count(self, total: int) -> int:
        """Return how many whole steps `total` fills; also the step that holds number `total`."""
        return self.steps_to(total + 1) - 1

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the step int64 [m] that holds each number int64 [m], from 0, and its position
        in it.

        Numbers below 0 come out as some number of a negative step.
        """
        befores, entries = np.array(self._befores), np.array(self.sizes_from)
        at = np.maximum(np.searchsorted(befores, numbers, side="right") - 1, 0)
        step, position = np.divmod(numbers - befores[at], entries[at, 1])
        return step + entries[at, 0], position

    def of_one_size(self, steps: range) -> Iterator[tuple[range, int]]:
        """Yield the longest parts of `steps` whose steps have one size, and that size."""
        for (first, size), stop in zip(
            self.sizes_from, [*self._firsts[1:], steps.stop], strict=True
        ):
            part = range(max(first, steps.start), min(stop, steps.stop))
            if part:
                yield part, size

    def until(self, step: int) -> StepSizes:
        """Return the sizes without the changes at `step` or later, those of the steps before it."""
        return StepSizes(tuple(entry for entry in self.sizes_from if entry[0] < max(step, 1)))

    def per(self, length: int) -> StepSizes:
        """Return sizes in tokens as sizes in rows of `length` tokens.

        Raises:
            UsageError: one of them is no multiple of the length.
        """
        names = ("global_batch_size", "one of the batch_sizes")
        return StepSizes(
            tuple(
                (first, rows_of_tokens(names[bool(first)], size, length))
                for first, size in self.sizes_from
            )
        )

    def __str__(self) -> str:
        first, *rest = (f"{size:,} tokens" for _, size in self.sizes_from)
        changes = zip(self._firsts[1:], rest, strict=True)
        return ", ".join([first, *(f"{size} from step {step + 1:,}" for step, size in changes)])


class Steps:
    """The steps of a schedule.

    Args:
        total_rows: rows of the schedule.
        sizes: G, rows of each step over all ranks.
        skip: half-open ranges of global rows that are left out.

    Attributes:
        count: whole steps.
        kept: the rows that are not skipped.

    Raises:
        UsageError: a skipped range is malformed.
    """

    def __init__(
        self, total_rows: int, sizes: StepSizes, skip: Iterable[Sequence[int]] = ()
    ) -> None:
        self.kept, self.sizes = KeptRows(total_rows, skip), sizes
        self.count = sizes.count(self.kept.count)

    @property
    def leftover(self) -> int:
        """Kept rows at the end that fill no step."""
        return self.kept.count - self.sizes.before(self.count)

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the global rows int64 [G] of a step, in order.

        Raises:
            UsageError: there is no such step.
        """
        if not 0 <= step < self.count:
            size = self.sizes.size(self.count)
            raise UsageError(
                f"there is no step {step + 1:,}",
                fix=f"steps of {self._sizes()} rows are numbered from 1 to {self.count:,}"
                if self.count
                else f"the schedule has {self.kept.count:,} rows, fewer than a step's {size:,}",
            )
        first, stop = self.sizes.before(step), self.sizes.before(step + 1)
        return self.kept.rows(np.arange(first, stop, dtype=np.int64))

    def step_of(self, rows: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the step int64 [m] of global rows [m], and their positions in it, int64 [m].

        The step is `SKIPPED` or `LEFT_OVER` for a row that no step has.
        """
        index = self.kept.index(np.asarray(rows, dtype=np.int64))
        step, position = self.sizes.locate(index)
        step[step >= self.count] = LEFT_OVER
        step[index < 0] = SKIPPED
        return step, position

    def _sizes(self) -> str:
        used = dict.fromkeys(size for _, size in self.sizes.of_one_size(range(self.count)))
        return ", then ".join(f"{size:,}" for size in used)


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the rows of a step are dealt out.

    Args:
        step_rows: G, rows of a step.
        world_size: W, ranks.
        microbatch_rows: b, rows of one micro-batch of one rank; None: all the rank has.

    Raises:
        UsageError: the step does not divide so.
    """

    step_rows: int
    world_size: int
    microbatch_rows: int | None = None

    def __post_init__(self) -> None:
        unit = self.world_size * (self.microbatch_rows or 1)
        if self.step_rows % unit:
            size = self.microbatch_rows
            raise UsageError(
                f"a step of {self.step_rows:,} rows does not divide into {self.world_size:,} ranks"
                + (f" and micro-batches of {size:,}" if size else ""),
                fix="give the world size and the micro-batch of the run",
            )

    def rank_of(self, position: int) -> tuple[int, int]:
        """Return (rank, micro-batch of that rank, from 0) that has row `position` of a step."""
        rank, inside = divmod(position, self.step_rows // self.world_size)
        return rank, inside // (self.microbatch_rows or self.step_rows)

    def positions(self, rank: int, microbatch: int | None) -> range:
        """Return the positions in a step of one rank's rows, or of one micro-batch of them.

        Raises:
            UsageError: there is no such rank or micro-batch.
        """
        mine = self.step_rows // self.world_size
        size = self.microbatch_rows or mine
        for name, number, count in (
            ("rank", rank, self.world_size),
            ("micro-batch", microbatch or 0, mine // size),
        ):
            if not 0 <= number < count:
                raise UsageError(
                    f"there is no {name} {number}", fix=f"they are numbered from 0 to {count - 1:,}"
                )
        if microbatch is None:
            return range(rank * mine, (rank + 1) * mine)
        return range(rank * mine + microbatch * size, rank * mine + (microbatch + 1) * size)


def rows_of_tokens(name: str, tokens: int, length: int) -> int:
    """Return a size in rows that is given in tokens, under the name of its option.

    Raises:
        UsageError: it is no multiple of the sequence length.
    """
    if tokens < length or tokens % length:
        low = max(0, tokens) // length * length
        near = " or ".join(f"{v:,}" for v in (low, low + length) if v)
        raise UsageError(
            f"{name} is {tokens:,} tokens, not a multiple of the sequence length {length:,}",
            fix=f"set {name} to {near}",
        )
    return tokens // length


@dataclass(frozen=True)
class Phase:
    """Neighbouring steps with the same sequence length.

    Attributes:
        first, stop: steps from 0, half-open.
        sequence_length: tokens of a row as trained.
    """

    first: int
    stop: int
    sequence_length: int


def find_phases(stages: Iterable[tuple[int, int]], kept: KeptRows, sizes: StepSizes) -> list[Phase]:
    """Return the phases of a run in order; together they hold each step once.

    A step belongs to the stage of its first row, also where it reaches into the next stage.

    Args:
        stages: rows and sequence length of each stage of the run, in order.
        kept: its rows without the skipped ones.
        sizes: rows of each step.
    """
    steps, last_row, first = sizes.count(kept.count), 0, 0
    phases: list[Phase] = []
    for rows, length in stages:
        last_row += rows
        # the first step whose first row is in the next stage or after it
        stop = min(steps, sizes.steps_to(kept.before(last_row)))
        if phases and phases[-1].sequence_length == length:
            phases[-1] = Phase(phases[-1].first, stop, length)
        elif first < stop:
            phases.append(Phase(first, stop, length))
        first = stop
    return phases


def phase_of(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase that step `step` (from 0) belongs to."""
    return phases[bisect_right(phases, step, key=lambda phase: phase.first) - 1]
