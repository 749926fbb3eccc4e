"""The verb behind `olm-data peek`: what is asked of a dataset or a lock, found and viewed.

dataset, document number | id | string --find.py--> views.DocumentView, ...
lock or dataset, row ------------------------------> views.RowView
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, printable, suggest
from olm_data.mixture.lock import Lock
from olm_data.peek.find import Watch, find_id, find_text
from olm_data.peek.views import (
    DocumentView,
    LockRows,
    RowView,
    view_document,
    view_part,
    view_row,
)
from olm_data.target import dataset_root, is_lock
from olm_data.tokenizer.tokenizer import TokenizerSpec

FIRST_DOCUMENTS, FIRST_ROWS, FIRST_HITS = 3, 2, 5
AROUND = 48
"""Tokens shown before and after a string that was searched for."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to look at: at most one of `doc`, `row`, `id` and `search`; else the first few.

    Attributes:
        doc, row: number of one document or row.
        id: id of documents in their source.
        search: string that documents hold.
        source: of a lock, with `doc`, `id` or `search`: the source whose documents.
        sequence_length: of a dataset with `row`.
        most: documents, rows or hits at most; None for a few.
        full: with `search`, the whole document instead of what is around the string.
    """

    doc: int | None = None
    row: int | None = None
    id: str | None = None
    search: str | None = None
    source: str | None = None
    sequence_length: int = 2048
    most: int | None = None
    full: bool = False


def peek(
    target: str, wanted: Wanted, *, watch: Watch | None = None
) -> Sequence[DocumentView | RowView]:
    """Return what is wanted of a dataset or of a lock's run.

    Args:
        target: a dataset (folder or URL) or a mixture lock (a `.json` file).
        watch: told how far a search is.

    Raises:
        UsageError: there is no such document, row or source, or nothing was found.
        InputError, ValidationError: there is no sound dataset or lock.
    """
    if not is_lock(target):
        dataset = Dataset.open(dataset_root(target))
        spec = dataset.tokenizer
        if wanted.row is not None:
            return [view_row(dataset, spec, wanted.row, wanted.sequence_length)]
        return _documents(dataset, spec, wanted, watch)
    lock = Lock.read(target)
    if wanted.doc is not None or wanted.id is not None or wanted.search is not None:
        dataset = lock.open_dataset(source_index(lock, wanted.source))
        return _documents(dataset, dataset.tokenizer, wanted, watch)
    shown = LockRows(lock)
    rows: Sequence[int] = range(min(wanted.most or FIRST_ROWS, lock.total_rows))
    if wanted.row is not None:
        rows = [wanted.row]
    return [shown.view(number) for number in rows]


def _documents(
    dataset: Dataset, spec: TokenizerSpec, wanted: Wanted, watch: Watch | None
) -> list[DocumentView]:
    if wanted.doc is not None:
        return [view_document(dataset, spec, wanted.doc)]
    if wanted.id is not None:
        most = wanted.most or FIRST_HITS
        hits = find_id(dataset, wanted.id, most=most, watch=watch)
        if not hits:
            raise UsageError(
                f"there is no document with the id '{printable(wanted.id)}'",
                where=dataset.store.root,
                fix="ids are those of the source; --search TEXT looks into the text",
            )
        return [view_document(dataset, spec, hit.document) for hit in hits]
    if wanted.search is not None:
        return _hits(dataset, spec, wanted.search, wanted, watch)
    numbers = range(min(wanted.most or FIRST_DOCUMENTS, dataset.documents))
    return [view_document(dataset, spec, number) for number in numbers]


def _hits(
    dataset: Dataset, spec: TokenizerSpec, text: str, wanted: Wanted, watch: Watch | None
) -> list[DocumentView]:
    if not text:
        raise UsageError("nothing to search for", where="--search")
    hits = find_text(dataset, spec, text, most=wanted.most or FIRST_HITS, watch=watch)
    if not hits:
        raise UsageError(
            f"no document holds '{printable(text)}'",
            where=dataset.store.root,
            fix="a search takes the text as it is: upper and lower case and spaces count",
        )
    views = []
    for hit in hits:
        low, high = dataset.document_span(hit.document)
        start, stop = max(0, hit.start - AROUND), min(high - low, hit.stop + AROUND)
        if wanted.full:
            start, stop = 0, high - low
        views.append(view_part(dataset, spec, hit.document, start, stop))
    return views


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
            "the source of the document is not given",
            fix=f"add --of NAME; this lock has {', '.join(names)}",
        )
    if name not in names:
        raise UsageError(f"the lock has no source {name!r}", fix=suggest(name, names))
    return names.index(name)
