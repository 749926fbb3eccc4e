"""Documents of a dataset, or of a mixture's sources with every row of the run that sees them.

    address | id | text --> Hit, ... --> DocumentView                              (dataset)
                                    `--> rows that see it -> step, rank of each    (lock)

An address is `NUMBER` or `SHARD:NUMBER`, in a mixture behind `SOURCE:`. Needs no index: ids and
texts are searched for, and where a document is seen is the inverse of the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import msgspec
import numpy as np
import pyarrow.compute as pc

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, printable, suggest
from olm_data.extensions.show.steps import Batches, Sighting, sightings
from olm_data.extensions.show.token_text import TokenBytes, token_bytes
from olm_data.rows.views import DocumentView, LockRows, not_there, view_part
from olm_data.runners.local import granted_cpus
from olm_data.storage.names import is_unicode
from olm_data.threads import in_order
from olm_data.tokenizer.tokenizer import TokenizerSpec

PIECE_TOKENS = 1 << 20

Watch = Callable[[int, int], None]
"""`watch(documents searched, documents in all)`."""


@dataclass(frozen=True)
class Hit:
    """A document found.

    Attributes:
        document: its number.
        start, stop: tokens of the document that hold the string, [start, stop); 0, 0 for an id.
    """

    document: int
    start: int = 0
    stop: int = 0


def find_id(dataset: Dataset, wanted: str, *, most: int, watch: Watch | None = None) -> list[Hit]:
    """Return the first `most` documents whose id is `wanted`."""
    if not is_unicode(wanted):
        return []  # ids are UTF-8

    def search(index: int) -> list[Hit]:
        first = int(dataset.document_ends[index]) - dataset.manifest.shards[index].documents
        hits: list[Hit] = []
        for rows in dataset.open_shard(index).docs.batches(["id"]):
            found = np.flatnonzero(pc.equal(rows.column("id"), wanted).fill_null(False))
            hits += [Hit(first + int(row)) for row in found]
            first += rows.num_rows
        return hits[:most]

    return list(islice(_in_order(dataset, search, watch), most))


def find_text(dataset: Dataset, text: str, *, most: int, watch: Watch | None = None) -> list[Hit]:
    """Return the first `most` documents that hold `text`, with its first place in each.

    Args:
        text: found as it is, upper and lower case differ.

    Raises:
        UsageError: it is empty.
    """
    if not text:
        raise UsageError("nothing to search for", fix="name a text that documents hold")
    if not is_unicode(text):
        return []  # texts are UTF-8, too
    rules, spec = dataset.manifest.tokenizer, dataset.tokenizer
    table = token_bytes(spec)
    if table is not None:
        table = table.without(rules.delimiters)

    def search(index: int) -> list[Hit]:
        if table is None:
            return list(islice(_search_decoded(dataset, spec, index, text), most))
        return list(islice(_search_bytes(dataset, table, index, text.encode()), most))

    return list(islice(_in_order(dataset, search, watch), most))


def _in_order(
    dataset: Dataset, search: Callable[[int], list[Hit]], watch: Watch | None
) -> Iterator[Hit]:
    shards, threads = range(len(dataset.manifest.shards)), granted_cpus()
    for index, hits in enumerate(in_order(search, shards, threads, ahead=threads)):
        if watch is not None:
            watch(int(dataset.document_ends[index]), dataset.documents)
        yield from hits


def _search_bytes(dataset: Dataset, table: TokenBytes, index: int, needle: bytes) -> Iterator[Hit]:
    """Yield the hits in one shard: at most one a document, in order."""
    shard = dataset.open_shard(index)
    first = int(dataset.document_ends[index]) - dataset.manifest.shards[index].documents
    ends = shard.ends
    total, start, last = int(ends[-1]), 0, -1
    while start < total:
        stop = min(total, start + PIECE_TOKENS)
        data, cuts = table.join(shard.read(start, stop))
        buffer, at = data.tobytes(), 0
        while (at := buffer.find(needle, at)) >= 0:
            low = int(np.searchsorted(cuts, at, side="right"))
            high = int(np.searchsorted(cuts, at + len(needle) - 1, side="right"))
            document = int(np.searchsorted(ends, np.uint64(start + low), side="right"))
            inside = int(ends[document]) > start + high
            if inside and document > last:
                begin = start - (int(ends[document - 1]) if document else 0)
                yield Hit(first + document, begin + low, begin + high + 1)
                last = document
            at += 1
            if inside:  # the rest of this document is of no interest
                after = int(ends[document]) - start
                at = max(at, int(cuts[min(after, len(cuts)) - 1]))
        if stop == total:
            return
        # the next piece begins before the string could: with tokens of len(needle) - 1 bytes
        keep = int(np.searchsorted(cuts, len(buffer) - len(needle) + 1, side="right"))
        start += max(1, min(keep, stop - start))


def _search_decoded(dataset: Dataset, spec: TokenizerSpec, index: int, text: str) -> Iterator[Hit]:
    shard = dataset.open_shard(index)
    first = int(dataset.document_ends[index]) - dataset.manifest.shards[index].documents
    rules = dataset.manifest.tokenizer
    begin = 0
    for number, end in enumerate(shard.ends.tolist()):
        ids = shard.read(begin, end)
        body = rules.body(ids)
        found = spec.decode(body).find(text)
        if found >= 0:
            start, stop = _token_span(spec, body, found, found + len(text))
            shift = int(rules.bos is not None)
            yield Hit(first + number, start + shift, stop + shift)
        begin = end


def _token_span(spec: TokenizerSpec, ids: np.ndarray, low: int, high: int) -> tuple[int, int]:
    """Return about which tokens hold characters [low, high): by halving, each step one decode."""

    def shortest(characters: int) -> int:
        """Return the least number of tokens whose text has so many characters."""
        short, long = 0, len(ids)
        while short < long:
            middle = (short + long) // 2
            if len(spec.decode(ids[:middle])) >= characters:
                long = middle
            else:
                short = middle + 1
        return short

    return max(shortest(low + 1) - 1, 0), shortest(high)


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
        what = f"document {number:,}" + (f" in {shard}" if shard else "")
        raise not_there(what, "documents", count, dataset.store.root)
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
