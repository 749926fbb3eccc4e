"""Documents of a dataset, or of a mixture's sources with every row of the run that sees them.

    address | id | text --> Hit, ... --> DocumentView                              (dataset)
                                    `--> rows that see it -> step, rank of each    (lock)

An address is `NUMBER` or `SHARD:NUMBER`, in a mixture behind `SOURCE:`. Needs no index: ids and
texts are searched for, and where a document is seen is the inverse of the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, printable, suggest
from olm_data.extensions.show.find import Hit, Watch, find_id, find_text
from olm_data.extensions.show.sightings import Sighting, sightings
from olm_data.extensions.show.steps import Batches
from olm_data.rows.views import DocumentView, LockRows, view_part

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


class DocumentSightings(msgspec.Struct, frozen=True, kw_only=True):
    """A document of a mixture, and the rows of the run that see it, ascending.

    Attributes:
        source: name of its source.
        document: its beginning, or what is around the text searched for.
    """

    source: str
    document: DocumentView
    sightings: list[Sighting]


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
    return [_view(dataset, hit, query.full, None) for hit in hits]


def show_sightings(
    rows: LockRows,
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
    names = [item.name for item in rows.lock.sources]
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
        most = query.most or FIRST_HITS
        return find_text(dataset, query.text, most=most, watch=watch)
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


def _view(dataset: Dataset, hit: Hit, full: bool, most: int | None) -> DocumentView:
    """View a document: around the hit, else its first `most` tokens; all of it where asked for."""
    low, high = dataset.document_span(hit.document)
    start, stop = 0, high - low
    if hit.stop and not full:
        start, stop = max(0, hit.start - AROUND), min(stop, hit.stop + AROUND)
    elif most is not None and not full:
        stop = min(stop, most)
    return view_part(dataset, hit.document, start, stop)


def _sighted(
    rows: LockRows, batches: Batches | None, index: int, hit: Hit, full: bool
) -> DocumentSightings:
    span = (hit.start, hit.stop) if hit.stop else None
    return DocumentSightings(
        source=rows.lock.sources[index].name,
        document=_view(rows.source(index)[0], hit, full, SIGHTED_TOKENS),
        sightings=sightings(rows, batches, index, hit.document, span),
    )
