"""What each label of an evaluation counts for: bytes of text, and groups of documents and places.

    dataset ------------------------> LabelGroups: document starts, text bytes, groups
    rows [first, first + b) of S tokens --.segments--> runs of labels, of one document and place
    sums of losses by segment ------------.add-------> float64 [groups, 3]: nats, labels, bytes

Bytes are those of the text, from `docs.parquet`. Those of a document are shared out evenly to its
labels, so that a part of a data set has bytes too; over a whole document they are its `text_bytes`.
Where no BOS begins documents, the EOS of the one before does, and their first token is a label;
where there is neither, it is none, and no bytes are known: they would count what is not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.docs import docs_schema, no_column
from olm_data.errors import UsageError, printable

if TYPE_CHECKING:
    import pyarrow as pa

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

LENGTH, POSITION, CONTEXT, INPUT = "document_length", "position", "context", "input"
COMPUTED = (LENGTH, POSITION, CONTEXT)
"""Ways to group labels that are no column of the documents."""
FIRST_EDGE = 64
"""Tokens: places and lengths are grouped below this, and then by powers of two."""
MOST_GROUPS = 32
"""Values of a column that have a group of their own, those with the most tokens."""
OTHER, NONE = "(other)", "(none)"
MOST_CHARACTERS = 80
"""Of a value, in the name of its group."""


@dataclass(frozen=True)
class Segments:
    """Runs of labels in a batch of rows, one behind the other.

    Attributes:
        offsets: int32 [n + 2], where they begin in the flattened batch; the last run of labels,
            to the end of the batch, is padding and counts for nothing.
        document: int64 [n], number of the document of each other run.
        position: int64 [n], place in its document of the first token that is predicted.
        context: int64 [n], how many tokens before that one are in the row.
    """

    offsets: NDArray[np.int32]
    document: Int64
    position: Int64
    context: Int64


class _Grouping(NamedTuple):
    """A way to group: what it is called, its groups, and of a column the group of each document."""

    name: str
    groups: list[str]
    of_document: Int64 | None


class LabelGroups:
    """The labels of a data set in rows of its stream, see `olm_data.rows.reader.DatasetRows`.

    Args:
        dataset: an open dataset.
        sequence_length: S.
        by: names of kept columns, or `input`, `document_length`, `position`, `context`.

    Attributes:
        groups: (way, group) of each row of the sums; the first is ("", ""), all labels.
        text_bytes: bytes of all documents; 0 where nothing is known of the text.
        labels: of all rows.

    Raises:
        UsageError: there is no such column, or a kept column has the name of a computed one.
        ValidationError: document rows are damaged.
    """

    def __init__(self, dataset: Dataset, sequence_length: int, by: Sequence[str] = ()) -> None:
        self._length, self._tokens = sequence_length, dataset.tokens
        ends = dataset.ends_between(0, dataset.tokens)
        self._starts = np.unique(np.concatenate([[0], ends, [dataset.tokens]]))
        lengths = np.diff(self._starts)
        rules = dataset.manifest.tokenizer
        self._first = int(rules.eos_begins is None)  # the first token of a document that is a label
        self._labels = np.maximum(lengths - self._first, 0)
        longest = int(lengths.max(initial=0))
        self._edges = _edges(longest)
        columns = [name for name in by if name not in COMPUTED]
        table = _read(dataset, by, columns)
        self._bytes = table.column("text_bytes").to_numpy().astype(np.float64)
        self._bytes *= bool(rules.delimiters)
        self.text_bytes, self.labels = int(self._bytes.sum()), int(self._labels.sum())
        ends = FIRST_EDGE << np.arange(len(self._edges) + 1)
        named = [f"{a}-{b - 1}" for a, b in zip([0, *self._edges], ends, strict=True)]
        self._ways = [_Grouping("", [""], np.zeros(len(lengths), np.int64))]
        for name in by:
            if name in (POSITION, CONTEXT):
                self._ways.append(_Grouping(name, named, None))
            elif name == LENGTH:
                self._ways.append(_Grouping(name, named, self._bucket(lengths)))
            else:
                paths = [each.path for each in dataset.manifest.inputs] if name == INPUT else None
                values = table.column(name)
                self._ways.append(_Grouping(name, *_grouped(values, lengths, paths)))
        self.groups = [(way.name, group) for way in self._ways for group in way.groups]

    def sums(self) -> Float64:
        """Return sums with nothing added: float64 [groups, 3], nats, labels and bytes."""
        return np.zeros((len(self.groups), 3))

    def segments(self, first: int, rows: int) -> Segments:
        """Return the runs of labels of `rows` rows from `first` on; `first` -1: padding alone."""
        length, ways = self._length, {way.name for way in self._ways}
        begin = first * length if first >= 0 else self._tokens
        stop = max(begin, min(begin + rows * length, self._tokens - self._first))
        starts = self._starts[:-1]
        low, high = np.searchsorted(starts, [begin, stop])
        pieces = np.unique(np.concatenate([np.arange(begin, stop, length), starts[low:high]]))
        parts = [pieces]
        if POSITION in ways:
            touched = starts[max(0, int(low) - 1) : high]
            ends = self._starts[max(0, int(low) - 1) + 1 : high + 1]
            parts.append(self._cuts(touched, ends, self._first))
        if CONTEXT in ways:
            parts.append(self._cuts(pieces, np.append(pieces[1:], stop), 1))
        edges = np.unique(np.concatenate(parts))
        edges = edges[(edges >= begin) & (edges < stop)]
        document = np.searchsorted(starts, edges, side="right") - 1
        piece = pieces[np.searchsorted(pieces, edges, side="right") - 1] if len(edges) else edges
        offsets = np.concatenate([edges - begin, [stop - begin, rows * length]])
        return Segments(
            offsets=offsets.astype(np.int32),
            document=document,
            position=edges - starts[document] + self._first,
            context=edges - piece + 1,
        )

    def add(self, totals: Float64, segments: Segments, nats: Float64, labels: Float64) -> None:
        """Add the losses of some segments to sums.

        Args:
            totals: float64 [groups, 3], changed in place.
            nats, labels: float64 [n], sums over each segment without the last one, the padding.
        """
        document = segments.document
        share = self._bytes[document] / np.maximum(self._labels[document], 1)
        values = (nats, labels, labels * share)
        first = 0
        for way in self._ways:
            count = len(way.groups)
            if way.of_document is not None:
                group = way.of_document[document]
            else:
                places = segments.position if way.name == POSITION else segments.context
                group = self._bucket(places)
            for column, value in enumerate(values):
                sums = np.bincount(group, weights=value, minlength=count)
                totals[first : first + count, column] += sums
            first += count

    def _bucket(self, numbers: Int64) -> Int64:
        return np.searchsorted(self._edges, numbers, side="right").astype(np.int64)

    def _cuts(self, starts: Int64, stops: Int64, first: int) -> Int64:
        """Return where a label is in another group of places than the one before it.

        Args:
            first: place of the label at each start.
        """
        cuts = starts[:, None] + self._edges[None, :] - first
        found: Int64 = cuts[cuts < stops[:, None]]
        return found


def _edges(longest: int) -> Int64:
    """Return 64, 128, ... as far as documents reach."""
    doublings = max(0, (max(longest, 1) - 1).bit_length() - (FIRST_EDGE - 1).bit_length())
    edges = FIRST_EDGE << np.arange(doublings + 1, dtype=np.int64)
    kept: Int64 = edges[edges < longest]
    return kept


def _read(dataset: Dataset, by: Sequence[str], columns: Sequence[str]) -> pa.Table:
    """Return text bytes and columns of all documents, from files that are the manifest's."""
    import pyarrow as pa

    names = list(dict.fromkeys(["text_bytes", *columns]))
    own = docs_schema()
    tables = []
    for number in range(len(dataset.manifest.shards)):
        dataset.check_docs(number, "bits per byte would be computed from other bytes")
        docs = dataset.shard(number).docs
        kept = [name for name in docs.schema().names if name not in own.names]
        _check(by, columns, kept, dataset.store.root)
        tables.append(docs.table(names))
    if tables:
        return pa.concat_tables(tables)
    return pa.table({name: pa.array([], pa.int64()) for name in names})


def _check(by: Sequence[str], columns: Sequence[str], kept: Sequence[str], where: str) -> None:
    both = set(COMPUTED) & set(kept) & set(by)
    if both:
        raise UsageError(
            f"{min(both)!r} is a kept column, and a way to group labels",
            where=where,
            fix="leave it out of `by`, or keep the column under another name",
        )
    known = [INPUT, *kept]
    for name in columns:
        if name not in known:
            raise no_column(name, [*known, *COMPUTED], where, " to group by")


def _grouped(
    values: pa.ChunkedArray, lengths: Int64, paths: Sequence[str] | None
) -> tuple[list[str], Int64]:
    """Return the groups of a column, most tokens first, and the group of each document."""
    import pyarrow as pa
    import pyarrow.compute as pc

    encoded = values.dictionary_encode().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0)
    known = [each if paths is None else paths[each] for each in encoded.dictionary.to_pylist()]
    spelled = [printable(str(each))[:MOST_CHARACTERS] for each in known] + [NONE]
    index = pc.fill_null(encoded.indices, len(spelled) - 1).to_numpy(zero_copy_only=False)
    numbers: dict[str, int] = {}
    merged = np.array([numbers.setdefault(each, len(numbers)) for each in spelled], np.int64)
    of_document = merged[index.astype(np.int64)]
    tokens = np.bincount(of_document, weights=lengths, minlength=len(numbers))
    names = list(numbers)
    order = sorted(range(len(names)), key=lambda n: (-tokens[n], names[n]))
    order = [n for n in order if tokens[n] > 0]
    shown = order if len(order) <= MOST_GROUPS else order[: MOST_GROUPS - 1]
    place = np.full(len(names), len(shown), np.int64)
    place[shown] = np.arange(len(shown))
    rest = [OTHER] if len(shown) < len(order) else []
    groups = [names[n] for n in shown] + rest
    return groups or [NONE], place[of_document]
