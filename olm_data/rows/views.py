"""Documents of a dataset, and rows of a dataset or of a run, decoded and with their origin.

    dataset, document number -> DocumentView      text, ids, where it came from
    lock or dataset, row     -> RowView           the pieces of documents the row is made of

Reads through `Dataset`, so what is shown has been verified.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from olm_data.bounded_json import JsonObject
from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.packing.concat import StreamRows, row_span, rows_in
from olm_data.packing.row_plan import RowPlan
from olm_data.tokenizer.tokenizer import TokenizerSpec


class DocumentView(msgspec.Struct, frozen=True, kw_only=True):
    """A document, or the piece of one that a row holds.

    Attributes:
        document: number in its dataset.
        shard: name of the shard that holds it.
        id: its id in the source, if it has one.
        input, position, position_kind: where it was read: file, and row, line or byte in it.
        start, stop: tokens of the document that are shown, [start, stop).
        tokens: tokens of the whole document, BOS and EOS included.
        text_bytes: bytes of the whole document's text.
        ids: the token ids shown.
        text: their text; a character cut at a row's edge is U+FFFD.
        bos, eos: whether the piece begins with BOS / ends with EOS (not in `text`).
        columns: kept columns.
        trained: [from, to) of `ids` that are trained, run by run; left out where all are.
    """

    document: int
    shard: str
    id: str | None
    input: str
    position: int
    position_kind: str
    start: int
    stop: int
    tokens: int
    text_bytes: int
    ids: list[int]
    text: str
    bos: bool
    eos: bool
    columns: JsonObject
    trained: list[tuple[int, int]] | UnsetType = UNSET


class RowView(msgspec.Struct, frozen=True, kw_only=True):
    """A row: `sequence_length` tokens and the one after them, cut into pieces of documents.

    Attributes:
        row_of_step, rank, micro_batch: where a step has the row; left out where no step is shown.
        row: number of the row in the run (lock) or in the dataset.
        stage, source, epoch: where the schedule places it; None for a dataset's own rows.
        view: which documents of the source are drawn on, None for all.
        source_row: number of the row in its source.
        first_token: position of its first token in the source's stream of tokens.
        sequence_length: tokens it is trained in at once: of its stage, or as asked for.
        pieces: documents in it, in order, and cut where a shorter row of its stage ends.
    """

    row_of_step: int | UnsetType = UNSET
    rank: int | UnsetType = UNSET
    micro_batch: int | UnsetType = UNSET
    row: int
    stage: str | None = None
    source: str | None = None
    epoch: int | None = None
    view: str | None = None
    source_row: int
    first_token: int
    sequence_length: int
    pieces: list[DocumentView]


def not_there(what: str, kind: str, count: int, where: str | None = None) -> UsageError:
    """Return the error for something beyond the `count` there are of its kind."""
    fix = f"{kind} are numbered from 0 to {count - 1:,}"
    return UsageError(f"there is no {what}", where=where, fix=fix)


def view_document(dataset: Dataset, number: int, *, most_tokens: int | None = None) -> DocumentView:
    """Return document `number` of a dataset, or its first `most_tokens` tokens.

    Raises:
        UsageError: there is no such document.
    """
    if not 0 <= number < dataset.documents:
        raise not_there(f"document {number}", "documents", dataset.documents, dataset.store.root)
    low, high = dataset.document_span(number)
    return view_part(dataset, number, 0, min(high - low, most_tokens or high - low))


class RowViews:
    """The rows that a dataset's own stream of tokens is cut into.

    Attributes:
        dataset: as given.
        total: how many rows of `sequence_length` tokens there are.
    """

    def __init__(self, dataset: Dataset, sequence_length: int) -> None:
        self.dataset, self._length = dataset, sequence_length
        self.total = rows_in(dataset.tokens, sequence_length)

    def tokenizer_of(self, source: str | None) -> TokenizerSpec:
        """Return the dataset's tokenizer: its rows have no source."""
        return self.dataset.tokenizer

    def view(self, row: int) -> RowView:
        """Return row `row` of the stream.

        Raises:
            UsageError: there is no such row.
        """
        if not 0 <= row < self.total:
            fix = f"rows are numbered from 0 to {self.total - 1:,}"
            raise UsageError(
                f"there is no row {row} of {self._length:,} tokens",
                where=self.dataset.store.root,
                fix=fix if self.total else "use a shorter row",
            )
        first, stop = row_span(row, self._length)
        return RowView(
            row=row,
            source_row=row,
            first_token=first,
            sequence_length=self._length,
            pieces=_pieces(self.dataset, first, stop),
        )


class LockRows:
    """The rows of the run a lock describes; opens each source when a row of it is first shown.

    Attributes:
        lock, schedule: the lock, and its order.
        total: rows of the run.
    """

    def __init__(self, lock: Lock) -> None:
        self.lock, self.schedule, self.total = lock, lock.schedule(), lock.total_rows
        self._sources: dict[int, tuple[Dataset, RowPlan | StreamRows]] = {}

    def source(self, index: int) -> tuple[Dataset, RowPlan | StreamRows]:
        """Return the dataset of source `index`, and which tokens its rows hold."""
        if index not in self._sources:
            self._sources[index] = self.lock.open_dataset(index), self.lock.open_rows(index)
        return self._sources[index]

    def tokenizer_of(self, source: str | None) -> TokenizerSpec:
        """Return the tokenizer of a source by its name."""
        names = [item.name for item in self.lock.sources]
        return self.source(names.index(str(source)))[0].tokenizer

    def view(self, row: int) -> RowView:
        """Return row `row` of the run.

        Raises:
            UsageError: there is no such row.
        """
        lock = self.lock
        if not 0 <= row < self.total:
            raise not_there(f"row {row}", "rows", self.total)
        origin = self.schedule.locate(np.array([row], np.int64))
        source, source_row = int(origin.source[0]), int(origin.row[0])
        dataset, rows = self.source(source)
        pieces = rows.pieces(source_row)
        length = lock.sequence_lengths[int(origin.stage[0])]
        kept = lock.sources[source].view
        return RowView(
            row=row,
            stage=lock.stages[int(origin.stage[0])].name,
            source=lock.sources[source].name,
            epoch=int(origin.epoch[0]),
            view=str(kept or "") or None,
            source_row=source_row,
            first_token=pieces[0][0],
            sequence_length=length,
            pieces=[
                piece
                for first, size in _cut(pieces, length, lock.sequence_length)
                for piece in _pieces(dataset, first, first + size)
            ],
        )


def _cut(pieces: list[tuple[int, int]], length: int, longest: int) -> list[tuple[int, int]]:
    """Cut the pieces of a row where the shorter rows end that it is trained as.

    The token after the row's last position is only a label and stays with it.
    """
    cut, position = [], 0
    for first, size in pieces:
        stop = position + size
        borders = range(position // length * length + length, min(stop, longest), length)
        edges = [position, *borders, stop]
        cut += [(first + low - position, high - low) for low, high in pairwise(edges)]
        position = stop
    return cut


def _pieces(dataset: Dataset, first: int, stop: int) -> list[DocumentView]:
    views = []
    number = dataset.document_at(first)
    cuts = [first, *dataset.ends_between(first, stop).tolist(), stop]
    for index, (low, high) in enumerate(pairwise(cuts)):
        start, _ = dataset.document_span(number + index)
        views.append(view_part(dataset, number + index, low - start, high - start))
    return views


def view_part(dataset: Dataset, number: int, start: int, stop: int) -> DocumentView:
    """Return tokens [start, stop) of a document; no other token is read."""
    rules, origin = dataset.manifest.tokenizer, dict(vars(dataset.origin(number)))
    first, last = dataset.document_span(number)
    ids = dataset.read(first + start, first + stop)
    bos = rules.bos is not None and start == 0
    eos = rules.eos is not None and first + stop == last
    trained: list[tuple[int, int]] | UnsetType = UNSET
    if dataset.manifest.trained is not None:
        mask = dataset.trained(first + start, first + stop)
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
        trained = list(zip(edges[::2], edges[1::2], strict=True))
    return DocumentView(
        document=origin.pop("number"),
        shard=dataset.shard_of(number)[0],
        start=start,
        stop=stop,
        tokens=last - first,
        ids=ids.tolist(),
        text=dataset.tokenizer.decode(ids[int(bos) : len(ids) - int(eos)]),
        bos=bos,
        eos=eos,
        trained=trained,
        **origin,
    )
