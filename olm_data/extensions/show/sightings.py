"""Where a run sees a document: the inverse of the order, without an index.

    document -> its tokens in the source's stream -> rows of the source   (division, or row plan)
             -> global rows in every epoch (Schedule.sightings) -> step, rank, micro-batch

A row sees a document if one of its S inputs belongs to it; the token after the inputs is only a
label.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from olm_data.extensions.show.steps import Batches
from olm_data.order.steps import LEFT_OVER, SKIPPED
from olm_data.rows.views import LockRows


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
            step=step,
            state=state,
            row_of_step=position,
            rank=rank,
            micro_batch=microbatch,
            holds_text=UNSET if hit is None else low - begin < hit[1] and hit[0] < high - begin,
        )
        for row, source_row, stage, epoch, (step, state, position, rank, microbatch) in seen
        for offset, low, high in pieces[source_row]
    ]


_Known = int | UnsetType
_InStep = tuple[_Known | None, str | UnsetType, _Known, _Known, _Known]
"""Step, state, row of the step, rank, micro-batch of a row, as far as they are known."""


def _steps(batches: Batches | None, rows: np.ndarray) -> Iterable[_InStep]:
    if batches is None or not len(rows):
        return [(UNSET,) * 5] * len(rows)
    found: list[_InStep] = []
    numbers, positions = batches.steps.step_of(rows)
    for number, position in zip(numbers.tolist(), positions.tolist(), strict=True):
        if number in (SKIPPED, LEFT_OVER):
            state = "skipped" if number == SKIPPED else "in no whole step"
            found.append((None, state, UNSET, UNSET, UNSET))
        else:
            step, became = number + 1, batches.state(number + 1)
            state_known = UNSET if became is None else became
            found.append((step, state_known, position, *batches.rank_of(step, position)))
    return found


def _parts(offset: int, size: int, shorter: int, longest: int) -> tuple[int, int]:
    """Return which rows of `shorter` tokens hold `size` tokens of a longest row at `offset`."""
    last = min(offset + size, longest) - 1
    return offset // shorter, last // shorter + 1
