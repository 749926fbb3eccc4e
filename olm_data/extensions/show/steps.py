"""What a step of a run saw, or will see: its rows, in the order they are dealt out to ranks.

    rows of a lock, step -> Steps.rows -> LockRows.view, row by row -> StepView

Steps are counted from 1, as a run's log does. Everything is computed from the lock and the
datasets; there is no index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from olm_data.errors import UsageError, ValidationError
from olm_data.order.steps import (
    LEFT_OVER,
    SKIPPED,
    Range,
    Split,
    Steps,
    StepSizes,
    order_digest,
    rows_of_tokens,
)
from olm_data.rows.views import LockRows, RowView
from olm_data.run_log.log import METRICS
from olm_data.run_log.run_folder import Run


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the run that sees a document.

    Attributes:
        row: global row.
        stage, epoch: where the schedule has it; the epoch is the source's.
        source_row: number of the row in its source.
        offset: token of the row, from 0, where the document begins in it.
        parts: which of the shorter rows it is in, half-open, where the stage trains the row as
            several (phases); (0, 1) elsewhere.
        start, stop: tokens of the document that the row holds, [start, stop).
        step: the step, from 1, that has the row; None where none has; left out, as all of the
            following, where it is not known.
        state: what became of the step, or why no step has the row.
        row_of_step, rank, micro_batch: where the step has it.
        holds_text: whether the row holds some of the text that was searched for.
    """

    row: int
    stage: str
    epoch: int
    source_row: int
    offset: int = msgspec.field(name="place")
    parts: tuple[int, int]
    start: int
    stop: int
    step: int | UnsetType | None = UNSET
    state: str | UnsetType = UNSET
    row_of_step: int | UnsetType = UNSET
    rank: int | UnsetType = UNSET
    micro_batch: int | UnsetType = UNSET
    holds_text: bool | UnsetType = UNSET

    @property
    def shorter_rows(self) -> str:
        """The shorter rows it is in, in words; "" where the row is trained whole."""
        first, end = self.parts
        return f"{first} to {end - 1}" if end > first + 1 else f"{first or ''}"


def sightings(
    rows: LockRows, batches: Batches | None, source: int, document: int, hit: tuple[int, int] | None
) -> list[Sighting]:
    """Return the rows of the run that see a document, ascending.

    Args:
        batches: for the steps; None: rows only.
        source: index of the document's source.
        hit: tokens [start, stop) of it that hold a text searched for.
    """
    dataset, source_rows = rows.source(source)
    begin, end = dataset.document_span(document)
    lock = rows.lock
    length = lock.sequence_length
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # row -> (offset, first, last token)
    for number in source_rows.rows_with(begin, end).tolist():
        offset = 0
        for first, size in source_rows.pieces(number):
            low, high = max(first, begin), min(first + size, end)
            if low < high and offset + low - first < length:
                pieces.setdefault(number, []).append((offset + low - first, low, high))
            offset += size
    found, which = rows.schedule.sightings(source, np.array(list(pieces), np.int64))
    origin = rows.schedule.locate(found)
    seen = zip(
        *(found.tolist(), which.tolist(), origin.stage.tolist(), origin.epoch.tolist()),
        _steps(batches, found),
        strict=True,
    )
    return [
        Sighting(
            row=row,
            stage=lock.stages[stage].name,
            epoch=epoch,
            source_row=source_row,
            offset=offset,
            parts=_parts(offset, high - low, lock.sequence_lengths[stage], length),
            start=low - begin,
            stop=high - begin,
            **known,
            holds_text=UNSET if hit is None else low - begin < hit[1] and hit[0] < high - begin,
        )
        for row, source_row, stage, epoch, known in seen
        for offset, low, high in pieces[source_row]
    ]


def _steps(batches: Batches | None, rows: np.ndarray) -> list[dict[str, Any]]:
    """Return what is known of the step of each row: fields of a `Sighting`."""
    if batches is None or not len(rows):
        return [{} for _ in rows]
    found: list[dict[str, Any]] = []
    numbers, positions = batches.steps.step_of(rows)
    for number, position in zip(numbers.tolist(), positions.tolist(), strict=True):
        if number in (SKIPPED, LEFT_OVER):
            state = "skipped" if number == SKIPPED else "in no whole step"
            found.append({"step": None, "state": state})
        else:
            step, became = number + 1, batches.state(number + 1)
            known = {} if became is None else {"state": became}
            found.append({"step": step, **known, **batches.place(step, position)})
    return found


def _parts(offset: int, size: int, shorter: int, longest: int) -> tuple[int, int]:
    """Return which rows of `shorter` tokens hold `size` tokens of a longest row at `offset`."""
    last = min(offset + size, longest) - 1
    return offset // shorter, last // shorter + 1


TRAINED, TO_COME = "trained", "to come"
NOT_TAKEN = "not taken"
"""Of a step that left the weights as they were: its loss or gradient was a spike, or not finite."""


class StepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a run's steps: the folder of the run, or the sizes themselves.

    Attributes:
        run: folder that says the sizes, the rows skipped and what is past.
        global_batch: tokens of a step.
        skip: rows left out, `FIRST:END` each.
        world: ranks.
        micro_batch_size: tokens of a micro-batch of a rank.
    """

    run: str | None = None
    global_batch: int | None = None
    skip: tuple[str, ...] = ()
    world: int | None = None
    micro_batch_size: int | None = None


class Batches:
    """The steps of a lock at some batch sizes, and how they are dealt out.

    Args:
        rows: of the lock.
        batch_sizes: tokens of each step.
        world_size: ranks, None if it does not matter.
        microbatch_size: tokens of a micro-batch of a rank, None if it does not matter.
        skip: ranges of rows left out.
        run: the run whose log says what is past.

    Raises:
        UsageError: sizes that are no multiple of the sequence length, or malformed ranges.
    """

    def __init__(
        self,
        rows: LockRows,
        *,
        batch_sizes: StepSizes,
        world_size: int | None = None,
        microbatch_size: int | None = None,
        skip: Sequence[Range] = (),
        run: Run | None = None,
    ) -> None:
        self.rows, self.run, self.batch_sizes = rows, run, batch_sizes
        length = rows.lock.sequence_length
        self.steps = Steps(rows.total, batch_sizes.per(length), skip)
        self._world_size, self._microbatch_rows = world_size, None
        if world_size is not None and microbatch_size is not None:
            self._microbatch_rows = rows_of_tokens("the micro-batch", microbatch_size, length)

    @classmethod
    def of(cls, rows: LockRows, options: StepOptions) -> Batches | None:
        """Return the steps that the options describe; None where they describe none.

        Raises:
            UsageError: an option lacks another, or a range of rows is malformed.
            InputError, ValidationError: the run cannot be read.
        """
        world, microbatch = options.world, options.micro_batch_size
        if microbatch is not None and world is None:
            raise needs("--micro-batch-size", "--world")
        if options.run is not None:
            run = Run.read(options.run)
            sizes, skip = run.batch_sizes, run.skip()
            microbatch = microbatch or run.microbatch_size
        elif options.global_batch is not None:
            run, sizes = None, StepSizes.constant(options.global_batch)
            skip = tuple(map(_range, options.skip))
        elif options.skip or world:
            raise unknown_size("--skip" if options.skip else "--world")
        else:
            return None
        return cls(
            rows,
            batch_sizes=sizes,
            world_size=world,
            microbatch_size=microbatch,
            skip=skip,
            run=run,
        )

    def state(self, step: int) -> str | None:
        """Return what became of step `step` (from 1); None without a run."""
        if self.run is None:
            return None
        if step > self.run.last_step:
            return TO_COME
        return NOT_TAKEN if step in self.run.not_taken else TRAINED

    def split(self, step: int) -> Split | None:
        """Return how step `step` (from 1) is dealt out; None where no world size is known.

        Raises:
            UsageError: the step does not divide so.
        """
        if self._world_size is None:
            return None
        return Split(
            step_rows=self.steps.sizes.size(step - 1),
            world_size=self._world_size,
            microbatch_rows=self._microbatch_rows,
        )

    def place(self, step: int, position: int) -> dict[str, int]:
        """Return where row `position` of a step (from 1) goes, as far as known: fields of its view.

        Raises:
            UsageError: the step does not divide into the ranks.
        """
        split, known = self.split(step), {"row_of_step": position}
        if split is not None:
            known["rank"], microbatch = split.rank_of(position)
            if split.microbatch_rows is not None:
                known["micro_batch"] = microbatch
        return known

    def sources(self, step: int) -> dict[tuple[str, str], int]:
        """Return the number of rows of a step (from 1) by their stage and source."""
        return self.rows.lock.tally(self.rows.schedule.locate(self.steps.rows(step - 1)))


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """A step, or a part of it.

    Attributes:
        step: its number, from 1.
        state: `trained`, `not taken`, `to come`, or None where no run was given.
        order: digest of the rows of the whole step.
        rows_of_step: how many rows the whole step has.
        rows: views of those shown, made one by one as they are asked for.
    """

    step: int
    state: str | None
    order: str
    rows_of_step: int
    rows: Iterator[RowView]


def show_step(
    batches: Batches,
    step: int,
    *,
    rank: int | None = None,
    microbatch: int | None = None,
    most: int | None = None,
) -> StepView:
    """Return what step `step` (from 1) saw or will see.

    Args:
        rank, microbatch: only the rows of one rank, of one of its micro-batches.
        most: rows at most.

    Raises:
        UsageError: there is no such step, rank or micro-batch.
        ValidationError: the run's log says that the step was made of other rows.
    """
    rows = batches.steps.rows(step - 1)
    _check_log(batches, step, rows)
    positions: Sequence[int] = range(len(rows))
    if rank is not None:
        split = batches.split(step)
        if split is None:
            raise needs("--rank", "--world")
        if microbatch is not None and split.microbatch_rows is None:
            raise UsageError(
                "--micro-batch needs the size of one",
                fix="add --run RUN, or --micro-batch-size TOKENS "
                "(train_module.rank_microbatch_size)",
            )
        positions = split.positions(rank, microbatch)
    elif microbatch is not None:
        raise needs("--micro-batch", "--rank")
    return StepView(
        step=step,
        state=batches.state(step),
        order=order_digest(batches.rows.lock.digest, rows),
        rows_of_step=len(rows),
        rows=(_row(batches, step, at, int(rows[at])) for at in positions[:most]),
    )


def _row(batches: Batches, step: int, position: int, row: int) -> RowView:
    return msgspec.structs.replace(batches.rows.view(row), **batches.place(step, position))


def needs(option: str, other: str) -> UsageError:
    """Return the error for an option that has no effect without another."""
    return UsageError(f"{option} needs {other}", fix=f"add {other} N")


def unknown_size(where: str) -> UsageError:
    """Return the error for steps of no known size."""
    return UsageError(
        "the size of a step is not known",
        where=where,
        fix="add --run RUN, or --global-batch TOKENS (data_loader.global_batch_size)",
    )


def _range(text: str) -> Range:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal()):
        raise UsageError(
            f"{text!r} is not a range of rows",
            where="--skip",
            fix="write FIRST:END, for example --skip 4096:8192",
        )
    return int(first), int(end)


def _check_log(batches: Batches, step: int, rows: NDArray[np.int64]) -> None:
    """Refuse to show a trained step that the log says was made of something else."""
    if batches.run is None:
        return
    lock = batches.rows.lock
    for logged in batches.run.steps:
        if logged.step == step and logged.order is not None and not lock.gave(logged.order, rows):
            raise ValidationError(
                f"step {step:,} of the run was not made of these rows",
                where=f"{batches.run.folder / METRICS}, line {logged.line}",
                why=f"its order digest is {logged.order}; this lock gives "
                f"{order_digest(lock.digest, rows)}",
                fix="give the lock the run was trained with; olm-data verify RUN checks all of "
                "the log",
            )
