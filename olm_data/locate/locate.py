"""`olm-data locate`: what a step saw, and which steps see a document.

    lock, step     -> Steps.rows -> peek.LockRows.view, row by row      -> StepView
    lock, document -> sightings  -> Steps.step_of: step, rank, past or future -> DocumentSightings

Steps are counted from 1, as a run's log does. Everything is computed from the lock, the datasets
and, for an id or a text, a search through the documents; there is no index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from olm_data.errors import UsageError, ValidationError, printable
from olm_data.locate.sightings import Sighting, document_number, parse_address, sightings
from olm_data.mixture.lock import Lock
from olm_data.mixture.whole_stage import stage_names
from olm_data.order.skip import Range
from olm_data.order.steps import (
    LEFT_OVER,
    SKIPPED,
    Split,
    Steps,
    StepSizes,
    order_digest,
    rows_of_tokens,
)
from olm_data.peek.find import Hit, Watch, find_id, find_text
from olm_data.peek.peek import FIRST_HITS, source_index
from olm_data.peek.views import (
    DocumentView,
    LockRows,
    RowView,
    view_document,
)
from olm_data.run_log.log import METRICS
from olm_data.run_log.run import Run

SHOWN_TOKENS = 64
"""Tokens of a document that are shown with its sightings."""

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


@dataclass(frozen=True, kw_only=True)
class DocumentSightings:
    """A document and the rows that see it.

    Attributes:
        source: name of its source.
        document: its beginning.
        hit: tokens [start, stop) of it that hold the text searched for, or None.
        sightings: rows of the run that see it, ascending.
        steps: of each of them: `step`, `state`, `place`, `rank`, `micro_batch` as far as known;
            empty where no batch size is known.
    """

    source: str
    document: DocumentView
    hit: tuple[int, int] | None
    sightings: list[Sighting]
    steps: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        seen = [
            {**sighting.to_json(), **step, "holds_text": self.holds(sighting)}
            if self.hit
            else {**sighting.to_json(), **step}
            for sighting, step in zip(self.sightings, self.steps, strict=True)
        ]
        return {"source": self.source, "document": self.document.to_json(), "sightings": seen}

    def holds(self, sighting: Sighting) -> bool:
        """Whether the row of a sighting holds some of the text that was searched for."""
        assert self.hit is not None
        return sighting.start < self.hit[1] and self.hit[0] < sighting.stop


def locate_step(
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
    names = stage_names(batches.lock)
    counts: Counter[tuple[str, str]] = Counter()
    for stage, source in sorted(zip(place.stage.tolist(), place.source.tolist(), strict=True)):
        counts[names[stage], batches.lock.sources[source].name] += 1
    places = list(range(len(rows)))
    if rank is not None:
        split = batches.split(step)
        assert split is not None
        places = list(split.places(rank, microbatch))
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


def locate_documents(
    lock: Lock,
    batches: Batches | None,
    *,
    identifier: str | None = None,
    address: str | None = None,
    text: str | None = None,
    source: str | None = None,
    most: int | None = None,
    watch: Watch | None = None,
) -> list[DocumentSightings]:
    """Return where the run sees the documents that are asked for by one of the three.

    Args:
        batches: for the steps; None: rows only.
        identifier: id in the source.
        address: `SOURCE:NUMBER` or `SOURCE:SHARD:NUMBER`.
        text: string the documents hold.
        source: search only this source.
        most: documents of each source at most.
        watch: told how far a search is.

    Raises:
        UsageError: there is no such document.
    """
    rows = LockRows(lock)
    hits: list[tuple[int, Hit]] = []
    if address is not None:
        index, shard, number = parse_address(address, lock)
        hits = [(index, Hit(document_number(rows.source(index)[0], shard, number)))]
    else:
        some = range(len(lock.sources)) if source is None else [source_index(lock, source)]
        for index in some:
            dataset = rows.source(index)[0]
            if identifier is not None:
                found = find_id(dataset, identifier, most=most or FIRST_HITS, watch=watch)
            else:
                assert text
                spec = dataset.tokenizer
                found = find_text(dataset, spec, text, most=most or FIRST_HITS, watch=watch)
            hits += [(index, hit) for hit in found]
    if not hits:
        raise UsageError(
            f"no document has the id '{printable(identifier)}'"
            if identifier is not None
            else f"no document holds '{printable(text or '')}'",
            where=f"source {source}" if source else f"all {len(lock.sources)} sources",
            fix="ids are those of the sources; --text TEXT looks into the text"
            if identifier is not None
            else "a search takes the text as it is: upper and lower case and spaces count",
        )
    return [_document(rows, batches, index, hit) for index, hit in hits]


def _document(rows: LockRows, batches: Batches | None, index: int, hit: Hit) -> DocumentSightings:
    dataset, plan = rows.source(index)
    start, stop = dataset.document_span(hit.document)
    seen = sightings(rows.lock, rows.schedule, index, plan, start, stop)
    steps: list[dict[str, Any]] = [{} for _ in seen]
    if batches is not None and seen:
        numbers, places = batches.steps.step_of([sighting.row for sighting in seen])
        steps = [
            _when(batches, int(number), int(place), sighting.row)
            for number, place, sighting in zip(numbers, places, seen, strict=True)
        ]
    return DocumentSightings(
        source=rows.lock.sources[index].name,
        document=view_document(dataset, rows.spec(index), hit.document, most_tokens=SHOWN_TOKENS),
        hit=(hit.start, hit.stop) if hit.stop else None,
        sightings=seen,
        steps=steps,
    )


def _when(batches: Batches, step: int, place: int, row: int) -> dict[str, Any]:
    """Return the step, from 1, of a row and its place in it, or why no step has it."""
    if step in (SKIPPED, LEFT_OVER):
        return {"step": None, "state": "skipped" if step == SKIPPED else "in no whole step"}
    state = batches.state(step + 1)
    return (
        {"step": step + 1}
        | ({} if state is None else {"state": state})
        | {"row_of_step": place, **batches.who(step + 1, place)}
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
                fix="give the lock the run was trained with; olm-data locate LOCK --verify-log RUN "
                "checks all of the log",
            )
