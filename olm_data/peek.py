"""`olm-data peek`: look at the documents of a dataset, or at the rows a mixture trains on.

    dataset, document number -> DocumentView      text, ids, where it came from
    lock or dataset, row     -> RowView           the pieces of documents the row is made of

Text is shown so that it cannot forge what is around it: control characters are escaped and each
line of it stands behind a bar. Reads through `Dataset`, so what is shown has been verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from olm_data.dataset import Dataset, Document
from olm_data.errors import UsageError, ValidationError, printable, suggest
from olm_data.lock import Lock
from olm_data.manifest import TOKENIZER
from olm_data.packing import row_span, rows_in
from olm_data.target import dataset_root, is_lock
from olm_data.tokenizer import TokenizerSpec, spec_from_bytes

SHOWN_IDS = 16
SHOWN_TEXT = 1200
FIRST_DOCUMENTS, FIRST_ROWS = 3, 2


@dataclass(frozen=True, kw_only=True)
class DocumentView:
    """A document, or the piece of one that a row holds.

    Attributes:
        document: number in its dataset.
        id: its id in the source, if it has one.
        input, position, position_kind: where it was read: file, and row, line or byte in it.
        start, stop: tokens of the document that are shown, [start, stop).
        tokens: tokens of the whole document, BOS and EOS included.
        text_bytes: bytes of the whole document's text.
        ids: the token ids shown.
        text: their text; a character cut at a row's edge is U+FFFD.
        bos, eos: whether the piece begins with BOS / ends with EOS (not in `text`).
        columns: kept columns.
    """

    document: int
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
    columns: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the view as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RowView:
    """A row: `sequence_length` tokens and the one after them, cut into pieces of documents.

    Attributes:
        row: number of the row in the run (lock) or in the dataset.
        stage, source, epoch: where the schedule places it; None for a dataset's own rows.
        source_row: number of the row in its source.
        first_token: position of its first token in the source's stream of tokens.
        pieces: documents in it, in order.
    """

    row: int
    stage: str | None
    source: str | None
    epoch: int | None
    source_row: int
    first_token: int
    pieces: list[DocumentView]

    def to_json(self) -> dict[str, Any]:
        """Return the view as a JSON object."""
        return asdict(self)


def peek(
    target: str,
    *,
    doc: int | None = None,
    row: int | None = None,
    source: str | None = None,
    sequence_length: int = 2048,
) -> Sequence[DocumentView | RowView]:
    """Return the document or row asked for, else the first few of a dataset or of a lock's run.

    Args:
        target: a dataset (folder or URL) or a mixture lock (a `.json` file).
        doc, row: number of one document or row; at most one of them.
        source: of a lock with `doc`: the source whose document it is.
        sequence_length: of a dataset with `row`.

    Raises:
        UsageError: there is no such document, row or source.
        InputError, ValidationError: there is no sound dataset or lock.
    """
    if not is_lock(target):
        dataset = Dataset.open(dataset_root(target))
        spec = dataset_tokenizer(dataset)
        if row is not None:
            return [view_row(dataset, spec, row, sequence_length)]
        numbers = [doc] if doc is not None else range(min(FIRST_DOCUMENTS, dataset.documents))
        return [view_document(dataset, spec, number) for number in numbers]
    lock = Lock.read(target)
    datasets = lock.open_datasets()
    if doc is not None:
        dataset = datasets[source_index(lock, source)]
        return [view_document(dataset, dataset_tokenizer(dataset), doc)]
    specs = [dataset_tokenizer(dataset) for dataset in datasets]
    rows = [row] if row is not None else range(min(FIRST_ROWS, lock.total_rows))
    return [view_lock_row(lock, datasets, specs, number) for number in rows]


def render(view: DocumentView | RowView, *, full: bool = False) -> str:
    """Return a view as lines for people; `full` shows all of the text."""
    if isinstance(view, RowView):
        return render_row(view, full=full)
    return render_document(view, full=full)


def dataset_tokenizer(dataset: Dataset) -> TokenizerSpec:
    """Return the tokenizer stored in a dataset; BOS and EOS are the manifest's business.

    Raises:
        ValidationError: it is missing, or not the one the dataset was made with.
    """
    url = dataset.store.url(TOKENIZER)
    rules = dataset.manifest.tokenizer
    try:
        data = dataset.store.read(TOKENIZER)
    except FileNotFoundError as error:
        raise ValidationError(
            "the dataset's tokenizer.json is missing", where=url, fix="restore it from a copy"
        ) from error
    spec = spec_from_bytes(data, name=dataset.tokenizer_name, eos="none", bos="none")
    if spec.sha256 != rules.sha256:
        raise ValidationError(
            "the tokenizer.json is not the one the dataset was made with",
            where=url,
            why="the ids would be shown as other text",
            fix="restore it from a copy",
        )
    return spec


def view_document(dataset: Dataset, spec: TokenizerSpec, number: int) -> DocumentView:
    """Return document `number` of a dataset.

    Raises:
        UsageError: there is no such document.
    """
    if not 0 <= number < dataset.documents:
        raise UsageError(
            f"there is no document {number}",
            where=dataset.store.root,
            fix=f"documents are numbered from 0 to {dataset.documents - 1:,}",
        )
    document = dataset.document(number)
    return _view(dataset, spec, document, 0, len(document.tokens))


def view_row(dataset: Dataset, spec: TokenizerSpec, row: int, sequence_length: int) -> RowView:
    """Return row `row` of a dataset's own stream.

    Raises:
        UsageError: there is no such row.
    """
    rows = rows_in(dataset.tokens, sequence_length)
    if not 0 <= row < rows:
        raise UsageError(
            f"there is no row {row} of {sequence_length:,} tokens",
            where=dataset.store.root,
            fix=f"rows are numbered from 0 to {rows - 1:,}" if rows else "use a shorter row",
        )
    first, stop = row_span(row, sequence_length)
    return RowView(
        row=row,
        stage=None,
        source=None,
        epoch=None,
        source_row=row,
        first_token=first,
        pieces=_pieces(dataset, spec, first, stop),
    )


def view_lock_row(
    lock: Lock, datasets: list[Dataset], specs: list[TokenizerSpec], row: int
) -> RowView:
    """Return row `row` of the run a lock describes.

    Args:
        datasets, specs: of the lock's sources, in its order.

    Raises:
        UsageError: there is no such row.
    """
    if not 0 <= row < lock.total_rows:
        raise UsageError(
            f"there is no row {row}", fix=f"rows are numbered from 0 to {lock.total_rows - 1:,}"
        )
    place = lock.schedule().locate(np.array([row], np.int64))
    source = int(place.source[0])
    inner = view_row(datasets[source], specs[source], int(place.row[0]), lock.sequence_length)
    return RowView(
        row=row,
        stage=lock.stages[int(place.stage[0])].name,
        source=lock.sources[source].name,
        epoch=int(place.epoch[0]),
        source_row=inner.source_row,
        first_token=inner.first_token,
        pieces=inner.pieces,
    )


def source_index(lock: Lock, name: str | None) -> int:
    """Return the index of the source called `name`; None is the only source there is.

    Raises:
        UsageError: no such source, or no name and several sources.
    """
    names = [source.name for source in lock.sources]
    if name is None and len(names) == 1:
        return 0
    if name is None:
        raise UsageError(
            "which source's document?", fix=f"add --of NAME; this lock has {', '.join(names)}"
        )
    if name not in names:
        raise UsageError(f"the lock has no source {name!r}", fix=suggest(name, names))
    return names.index(name)


def _pieces(dataset: Dataset, spec: TokenizerSpec, first: int, stop: int) -> list[DocumentView]:
    views = []
    number = dataset.document_at(first)
    cuts = [first, *dataset.ends_between(first, stop).tolist(), stop]
    for index, (low, high) in enumerate(pairwise(cuts)):
        start, _ = dataset.document_span(number + index)
        document = dataset.document(number + index)
        views.append(_view(dataset, spec, document, low - start, high - start))
    return views


def _view(
    dataset: Dataset, spec: TokenizerSpec, document: Document, start: int, stop: int
) -> DocumentView:
    rules, ids = dataset.manifest.tokenizer, document.tokens[start:stop]
    bos = rules.bos is not None and start == 0
    eos = rules.eos is not None and stop == len(document.tokens)
    return DocumentView(
        document=document.number,
        id=document.id,
        input=document.input,
        position=document.position,
        position_kind=document.position_kind,
        start=start,
        stop=stop,
        tokens=len(document.tokens),
        text_bytes=document.text_bytes,
        ids=ids.tolist(),
        text=spec.decode(ids[int(bos) : len(ids) - int(eos)]),
        bos=bos,
        eos=eos,
        columns=document.columns,
    )


def render_document(view: DocumentView, *, full: bool = False) -> str:
    """Return a document, or a piece of one, as lines for people.

    Args:
        full: show all of the text; otherwise its first characters.
    """
    name = "" if view.id is None else f"  id {printable(view.id)}"
    part = ""
    if (view.start, view.stop) != (0, view.tokens):
        part = f"  tokens {view.start:,} to {view.stop:,} of {view.tokens:,}"
    head = [
        f"-- document {view.document}{name}{part}",
        f"   {printable(view.input)}, {view.position_kind} {view.position:,}; "
        f"{view.tokens:,} tokens, {view.text_bytes:,} bytes of text",
    ]
    if view.columns:
        kept = (f"{printable(key)}={printable(str(value))}" for key, value in view.columns.items())
        head.append("   " + ", ".join(kept))
    ids = ", ".join(map(str, view.ids[:SHOWN_IDS]))
    more = f", ... {len(view.ids) - SHOWN_IDS:,} more" if len(view.ids) > SHOWN_IDS else ""
    head.append(f"   ids [{ids}{more}]")
    text = view.text if full else view.text[:SHOWN_TEXT]
    if view.bos:
        head.append("   [BOS]")
    body = [f"   | {printable(line)}" for line in text.split("\n")]
    if len(text) < len(view.text):
        body.append(f"   ... {len(view.text) - len(text):,} more characters (--full shows all)")
    end = ["   [EOS] end of document"] if view.eos else []
    if not view.eos and view.stop == view.tokens:
        end = ["   end of document"]
    return "\n".join(head + body + end)


def render_row(view: RowView, *, full: bool = False) -> str:
    """Return a row as lines for people: its place, then its pieces of documents."""
    place = f"token {view.first_token:,}"
    if view.source is not None:
        place = (
            f"stage {view.stage}, source {view.source}, epoch {view.epoch}, "
            f"row {view.source_row:,} of the source, {place}"
        )
    count = sum(piece.stop - piece.start for piece in view.pieces)
    head = f"== row {view.row}: {place}; {count:,} tokens in {len(view.pieces)} documents"
    return "\n".join([head, *(render_document(piece, full=full) for piece in view.pieces)])
