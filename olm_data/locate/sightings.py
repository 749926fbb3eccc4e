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
from numpy.typing import NDArray

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, suggest
from olm_data.mixture.lock import Lock
from olm_data.mixture.whole_stage import stage_names
from olm_data.order.schedule import Schedule
from olm_data.packing.packing import row_span
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
    lock: Lock, schedule: Schedule, source: int, plan: RowPlan | None, start: int, stop: int
) -> list[Sighting]:
    """Return the rows of the run that see tokens [start, stop) of a source, ascending.

    Args:
        schedule: the lock's.
        source: index of the source.
        plan: its row plan, None where its rows are windows of its stream.
    """
    length, rows = lock.sequence_length, lock.sources[source].rows
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # row -> (place, first, last token)
    for row in _candidates(plan, start, stop, length, rows).tolist():
        place = 0
        for first, size in _stretches(plan, row, length):
            low, high = max(first, start), min(first + size, stop)
            if low < high and place + low - first < length:
                pieces.setdefault(row, []).append((place + low - first, low, high))
            place += size
    names = stage_names(lock)
    found, which = schedule.sightings(source, np.array(list(pieces), np.int64))
    where = schedule.locate(found)
    seen = zip(found.tolist(), which.tolist(), where.stage, where.epoch.tolist(), strict=True)
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


def _candidates(
    plan: RowPlan | None, start: int, stop: int, length: int, rows: int
) -> NDArray[np.int64]:
    """Return the source's rows that may see tokens [start, stop)."""
    if plan is not None:
        return plan.rows_with(start, stop)
    return np.arange(start // length, min((stop - 1) // length + 1, rows), dtype=np.int64)


def _stretches(plan: RowPlan | None, row: int, length: int) -> list[tuple[int, int]]:
    """Return (first token, tokens) of each stretch of a row of the source, in order."""
    if plan is not None:
        return plan.pieces(row)
    first, stop = row_span(row, length)
    return [(first, stop - first)]


def parse_address(address: str, lock: Lock) -> tuple[int, str | None, int]:
    """Return (source, shard's name or None, document) of `SOURCE:DOC` or `SOURCE:SHARD:DOC`.

    Raises:
        UsageError: it is no such address, or there is no such source.
    """
    names = [source.name for source in lock.sources]
    name, *rest = address.split(":")
    if len(rest) not in (1, 2) or not rest[-1].isdecimal():
        raise UsageError(
            f"{address!r} is not the address of a document",
            where="--address",
            fix=f"write SOURCE:NUMBER or SOURCE:SHARD:NUMBER, for example {names[0]}:17 or "
            f"{names[0]}:shard-00000:17",
        )
    if name not in names:
        raise UsageError(
            f"the lock has no source {name!r}", where="--address", fix=suggest(name, names)
        )
    return names.index(name), rest[0] if len(rest) == 2 else None, int(rest[-1])


def document_number(dataset: Dataset, shard: str | None, number: int) -> int:
    """Return the number in the dataset of document `number` of a shard, or of the dataset.

    Raises:
        UsageError: there is no such shard or document.
    """
    first, count = 0, dataset.documents
    if shard is not None:
        names = [info.name for info in dataset.manifest.shards]
        if shard not in names:
            raise UsageError(
                f"there is no shard {shard!r}", where=dataset.store.root, fix=suggest(shard, names)
            )
        index = names.index(shard)
        count = dataset.manifest.shards[index].documents
        first = int(dataset.document_ends[index]) - count
    if number >= count:
        raise UsageError(
            f"there is no document {number:,} in {shard or 'the dataset'}",
            where=dataset.store.root,
            fix=f"they are numbered from 0 to {count - 1:,}",
        )
    return first + number
