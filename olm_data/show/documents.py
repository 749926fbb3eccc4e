"""Documents of a dataset, or of a mixture's sources with every row of the run that sees them.

    address | id | text --> Hit, ... --> DocumentView                              (dataset)
                                    `--> rows that see it -> step, rank of each    (lock)

An address is `NUMBER` or `SHARD:NUMBER`, in a mixture behind `SOURCE:`. Needs no index: ids and
texts are searched for, and where a document is seen is the inverse of the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, printable, suggest
from olm_data.mixture.lock import Lock
from olm_data.order.steps import LEFT_OVER, SKIPPED
from olm_data.rows.views import DocumentView, LockRows, view_part
from olm_data.show.find import Hit, Watch, find_id, find_text
from olm_data.show.sightings import Sighting, sightings
from olm_data.show.steps import Batches
from olm_data.tokenizer.tokenizer import TokenizerSpec

FIRST_DOCUMENTS, FIRST_HITS = 3, 5
AROUND = 48
"""Tokens shown before and after a string that was searched for."""

SIGHTED_TOKENS = 64
"""Tokens of a document that are shown with its sightings."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """What to look for: at most one of `address`, `id` and `text`; else the first few documents.

    Attributes:
        address: of a document.
        id: id of documents in their source.
        text: string that documents hold.
        most: documents of each source at most; None for a few.
        full: all tokens of a document instead of what is around the string, or its beginning.
    """

    address: str | None = None
    id: str | None = None
    text: str | None = None
    most: int | None = None
    full: bool = False


@dataclass(frozen=True, kw_only=True)
class DocumentSightings:
    """A document of a mixture and the rows that see it.

    Attributes:
        source: name of its source.
        document: its beginning, or what is around the text searched for.
        hit: tokens [start, stop) of it that hold the text searched for, or None.
        sightings: rows of the run that see it, ascending.
        steps: of each of them: `step`, `state`, `row_of_step`, `rank`, `micro_batch` as far as
            known; empty where no batch size is known.
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


def show_documents(
    dataset: Dataset, query: Query, *, watch: Watch | None = None
) -> list[DocumentView]:
    """Return the documents of a dataset that a query names.

    Args:
        watch: told how far a search is.

    Raises:
        UsageError: there is no such document.
    """
    hits = _hits(dataset, query, watch)
    if not hits:
        raise _nothing(query, dataset.store.root)
    spec = dataset.tokenizer
    return [_view(dataset, spec, hit, query.full, None) for hit in hits]


def show_sightings(
    lock: Lock,
    query: Query,
    batches: Batches | None = None,
    *,
    source: str | None = None,
    watch: Watch | None = None,
) -> list[DocumentSightings]:
    """Return the documents of a mixture that a query names, with the rows that see them.

    Args:
        batches: for the steps; None: rows only.
        source: search only this source.
        watch: told how far a search is.

    Raises:
        UsageError: there is no such document or source.
    """
    rows = LockRows(lock)
    names = [item.name for item in lock.sources]
    if source is not None and source not in names:
        raise UsageError(f"the lock has no source {source!r}", fix=suggest(source, names))
    if query.id is None and query.text is None:
        index, hits = _addressed(rows, query, source)
        found = [(index, hit) for hit in hits]
    else:
        found = [
            (index, hit)
            for index, name in enumerate(names)
            if source in (None, name)
            for hit in _hits(rows.source(index)[0], query, watch)
        ]
    if not found:
        raise _nothing(query, f"source {source}" if source else f"all {len(names)} sources")
    return [_sighted(rows, batches, index, hit, query.full) for index, hit in found]


def _addressed(rows: LockRows, query: Query, source: str | None) -> tuple[int, list[Hit]]:
    """Return the index of the source that an address names, and the documents."""
    names = [item.name for item in rows.lock.sources]
    name, colon, rest = (query.address or "").partition(":")
    if colon and source is None and (name in names or len(names) > 1):
        if name not in names:
            raise UsageError(f"the lock has no source {name!r}", fix=suggest(name, names))
        source, query = name, replace(query, address=rest)
    if source is None and len(names) > 1:
        if query.address is not None and not query.address.isdecimal():
            raise _no_address(query.address)
        raise UsageError(
            "the source of the document is not given",
            fix=f"write SOURCE:{query.address or 'NUMBER'}, or add --of SOURCE; this lock has "
            f"{', '.join(names)}",
        )
    index = names.index(source or names[0])
    return index, _hits(rows.source(index)[0], query, None)


def _hits(dataset: Dataset, query: Query, watch: Watch | None) -> list[Hit]:
    """Return the documents of one dataset that a query names, in order."""
    if query.id is not None:
        return find_id(dataset, query.id, most=query.most or FIRST_HITS, watch=watch)
    if query.text is not None:
        if not query.text:
            raise UsageError("nothing to search for", fix="name a text that documents hold")
        most = query.most or FIRST_HITS
        return find_text(dataset, dataset.tokenizer, query.text, most=most, watch=watch)
    first, most = 0, query.most or FIRST_DOCUMENTS
    if query.address is not None:
        first, most = document_number(dataset, query.address), query.most or 1
    return [Hit(number) for number in range(first, min(first + most, dataset.documents))]


def document_number(dataset: Dataset, address: str) -> int:
    """Return the number in the dataset of the document `NUMBER` or `SHARD:NUMBER`.

    Raises:
        UsageError: it is no such address, or there is no such shard or document.
    """
    shard, _, text = address.rpartition(":")
    if not text.isdecimal():
        raise _no_address(address)
    number, first, count = int(text), 0, dataset.documents
    if shard:
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
            f"there is no document {number:,}" + (f" in {shard}" if shard else ""),
            where=dataset.store.root,
            fix=f"documents are numbered from 0 to {count - 1:,}",
        )
    return first + number


def _no_address(address: str) -> UsageError:
    return UsageError(
        f"'{printable(address)}' is not the address of a document",
        fix="write NUMBER or SHARD:NUMBER, for example 17 or shard-00000:17, in a mixture SOURCE: "
        "before it; --id ID finds one by its id",
    )


def _nothing(query: Query, where: str) -> UsageError:
    if query.id is not None:
        return UsageError(
            f"no document has the id '{printable(query.id)}'",
            where=where,
            fix="ids are those of the source; olm-data show search looks into the text",
        )
    return UsageError(
        f"no document holds '{printable(query.text or '')}'",
        where=where,
        fix="a search takes the text as it is: upper and lower case and spaces count",
    )


def _view(
    dataset: Dataset, spec: TokenizerSpec, hit: Hit, full: bool, most: int | None
) -> DocumentView:
    """View a document: around the hit, else its first `most` tokens; all of it where asked for."""
    low, high = dataset.document_span(hit.document)
    start, stop = 0, high - low
    if hit.stop and not full:
        start, stop = max(0, hit.start - AROUND), min(stop, hit.stop + AROUND)
    elif most is not None and not full:
        stop = min(stop, most)
    return view_part(dataset, spec, hit.document, start, stop)


def _sighted(
    rows: LockRows, batches: Batches | None, index: int, hit: Hit, full: bool
) -> DocumentSightings:
    dataset, source_rows = rows.source(index)
    seen = sightings(
        rows.lock, rows.schedule, index, source_rows, *dataset.document_span(hit.document)
    )
    return DocumentSightings(
        source=rows.lock.sources[index].name,
        document=_view(dataset, rows.spec(index), hit, full, SIGHTED_TOKENS),
        hit=(hit.start, hit.stop) if hit.stop else None,
        sightings=seen,
        steps=_steps(batches, [sighting.row for sighting in seen]),
    )


def _steps(batches: Batches | None, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return the step, from 1, of each row and its place in it, or why no step has it."""
    if batches is None or not rows:
        return [{} for _ in rows]
    found: list[dict[str, Any]] = []
    for number, place in zip(*map(list, batches.steps.step_of(rows)), strict=True):
        if number in (SKIPPED, LEFT_OVER):
            state = "skipped" if number == SKIPPED else "in no whole step"
            found.append({"step": None, "state": state})
            continue
        step = int(number) + 1
        became = batches.state(step)
        found.append(
            {"step": step}
            | ({} if became is None else {"state": became})
            | {"row_of_step": int(place), **batches.who(step, int(place))}
        )
    return found
