"""What a step of a run saw, or will see: its rows, in the order they are dealt out to ranks.

    lock, step -> Steps.rows -> LockRows.view, row by row -> StepView

Steps are counted from 1, as a run's log does. Everything is computed from the lock and the
datasets; there is no index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.order.skip import Range
from olm_data.order.steps import Split, Steps, StepSizes, order_digest, rows_of_tokens
from olm_data.rows.views import LockRows, RowView
from olm_data.run_log.log import METRICS
from olm_data.run_log.run import Run

TRAINED, TO_COME = "trained", "to come"
NOT_TAKEN = "not taken"
"""Of a step that left the weights as they were: its loss or gradient was a spike or no number."""


class Batches:
    """The steps of a lock at some batch sizes, and how they are dealt out.

    Args:
        lock: the lock.
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
        lock: Lock,
        *,
        batch_sizes: StepSizes,
        world_size: int | None = None,
        microbatch_size: int | None = None,
        skip: Sequence[Range] = (),
        run: Run | None = None,
    ) -> None:
        self.lock, self.run, self.batch_sizes = lock, run, batch_sizes
        length = lock.sequence_length
        self.steps = Steps(lock.total_rows, batch_sizes.per(length), skip)
        self._world_size, self._microbatch_rows = world_size, None
        if world_size is not None and microbatch_size is not None:
            self._microbatch_rows = rows_of_tokens("the micro-batch", microbatch_size, length)

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

    def who(self, step: int, place: int) -> dict[str, int]:
        """Return the rank, and if known the micro-batch, that has row `place` of a step (from 1).

        Raises:
            UsageError: the step does not divide so.
        """
        split = self.split(step)
        if split is None:
            return {}
        rank, microbatch = split.rank_of(place)
        return {"rank": rank} | (
            {} if split.microbatch_rows is None else {"micro_batch": microbatch}
        )


@dataclass(frozen=True, kw_only=True)
class StepView:
    """A step, or a part of it.

    Attributes:
        step: its number, from 1.
        state: `trained`, `not taken`, `to come`, or None where no run was given.
        order: digest of the rows of the whole step.
        sources: rows of the whole step by (stage, source).
        places: places in the step of the rows shown, ascending.
        who: of each of them, its rank and micro-batch as far as they are known.
        rows: views of them, made one by one as they are asked for.
    """

    step: int
    state: str | None
    order: str
    sources: dict[tuple[str, str], int]
    places: list[int]
    who: list[dict[str, int]]
    rows: Iterator[RowView] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; reads all rows."""
        shown = zip(self.places, self.who, self.rows, strict=True)
        return {
            "step": self.step,
            "state": self.state,
            "order": self.order,
            "rows_of_step": sum(self.sources.values()),
            "rows": [{"row_of_step": place, **who, **row.to_json()} for place, who, row in shown],
        }


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
    order = order_digest(batches.lock.digest, rows)
    _check_log(batches, step, order)
    shown = LockRows(batches.lock)
    place = shown.schedule.locate(rows)
    names = [stage.name for stage in batches.lock.stages]
    counts: Counter[tuple[str, str]] = Counter()
    for stage, source in sorted(zip(place.stage.tolist(), place.source.tolist(), strict=True)):
        counts[names[stage], batches.lock.sources[source].name] += 1
    places = list(range(len(rows)))
    if rank is not None:
        split = batches.split(step)
        if split is None:
            raise UsageError("the number of ranks is not known", fix="add --world RANKS")
        places = list(split.positions(rank, microbatch))
    places = places[:most]
    return StepView(
        step=step,
        state=batches.state(step),
        order=order,
        sources=dict(counts),
        places=places,
        who=[batches.who(step, place) for place in places],
        rows=(shown.view(int(rows[place])) for place in places),
    )


def _check_log(batches: Batches, step: int, order: str) -> None:
    """Refuse to show a trained step that the log says was made of something else."""
    if batches.run is None:
        return
    for logged in batches.run.steps:
        if logged.step == step and logged.order not in (None, order):
            raise ValidationError(
                f"step {step:,} of the run was not made of these rows",
                where=f"{batches.run.folder / METRICS}, line {logged.line}",
                why=f"its order digest is {logged.order}; this lock gives {order}",
                fix="give the lock the run was trained with; olm-data verify RUN checks all of "
                "the log",
            )
