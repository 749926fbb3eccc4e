"""Where a run sees a document: the inverse of the order, without an index.

    document -> its tokens in the source's stream -> rows of the source   (division, or row plan)
             -> global rows in every epoch (Schedule.sightings) -> step, rank, micro-batch

A row sees a document if one of its S inputs belongs to it; the token after the inputs is only a
label. Never: read tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from olm_data.mixture.lock import Lock
from olm_data.order.schedule import Schedule
from olm_data.packing.concat import StreamRows
from olm_data.packing.row_plan import RowPlan


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A row of the run that sees a document.

    Attributes:
        row: global row.
        stage, epoch: where the schedule places it; the epoch is the source's.
        source_row: number of the row in its source.
        place: token of the row, from 0, where the document begins in it.
        parts: which of the shorter rows it is in, half-open, where the stage trains the row as
            several (phases); (0, 1) elsewhere.
        start, stop: tokens of the document that the row holds, [start, stop).
    """

    row: int
    stage: str
    epoch: int
    source_row: int
    place: int
    parts: tuple[int, int]
    start: int
    stop: int

    def to_json(self) -> dict[str, Any]:
        """Return the sighting as a JSON object."""
        return asdict(self)


def sightings(
    lock: Lock, schedule: Schedule, source: int, rows: RowPlan | StreamRows, start: int, stop: int
) -> list[Sighting]:
    """Return the rows of the run that see tokens [start, stop) of a source, ascending.

    Args:
        schedule: the lock's.
        source: index of the source.
        rows: which tokens its rows hold.
    """
    length = lock.sequence_length
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # row -> (place, first, last token)
    for row in rows.rows_with(start, stop).tolist():
        place = 0
        for first, size in rows.pieces(row):
            low, high = max(first, start), min(first + size, stop)
            if low < high and place + low - first < length:
                pieces.setdefault(row, []).append((place + low - first, low, high))
            place += size
    names = [stage.name for stage in lock.stages]
    found, which = schedule.sightings(source, np.array(list(pieces), np.int64))
    origin = schedule.locate(found)
    seen = zip(found.tolist(), which.tolist(), origin.stage, origin.epoch.tolist(), strict=True)
    return [
        Sighting(
            row=row,
            stage=names[int(stage)],
            epoch=epoch,
            source_row=source_row,
            place=place,
            parts=_parts(place, high - low, lock.sequence_lengths[int(stage)], length),
            start=low - start,
            stop=high - start,
        )
        for row, source_row, stage, epoch in seen
        for place, low, high in pieces[source_row]
    ]


def _parts(place: int, size: int, shorter: int, longest: int) -> tuple[int, int]:
    """Return which rows of `shorter` tokens hold `size` tokens from `place` on of a longest row."""
    last = min(place + size, longest) - 1
    return place // shorter, last // shorter + 1
