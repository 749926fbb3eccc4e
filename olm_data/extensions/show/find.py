"""Find documents of a dataset by their id, or by a string that their text holds.

    id:     column `id` of docs.parquet, 65,536 rows at a time
    string: tokens of a shard, a million at a time -> bytes -> find -> token -> document

Shards are searched on all cores, a few at a time and in order, until enough is found. A hit lies
within one document; BOS and EOS are no text. What is searched is the text the tokens decode to,
which of a tokenizer that normalises is not the text it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow.compute as pc

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError
from olm_data.extensions.show.token_text import TokenBytes, token_bytes
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
