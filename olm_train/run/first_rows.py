"""The rows a run begins with, for people: `--dry-run` shows them before anything is spent.

    lock, rows of the first step -> LockRows.view -> a line a row, a line a document

Never: reads a remote dataset, or fails a run for want of a tokenizer that it does not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from olm_data.errors import ValidationError, printable
from olm_data.mixture.lock import Lock
from olm_data.rows.views import LockRows
from olm_data.storage.store import is_remote

SHOWN_ROWS = 2
SHOWN_DOCUMENTS = 3
SHOWN_CHARACTERS = 72


def first_rows(lock: Lock, rows: Sequence[int]) -> Iterator[str]:
    """Yield lines about the first few of `rows`, ids of rows of the lock's schedule."""
    shown = LockRows(lock)
    for row in rows[:SHOWN_ROWS]:
        yield from _row(shown, int(row))
    if len(rows) > SHOWN_ROWS:
        yield f"... and {len(rows) - SHOWN_ROWS:,} more rows in this step"


def _row(shown: LockRows, row: int) -> Iterator[str]:
    lock = shown.lock
    place = shown.schedule.locate(np.array([row], np.int64))
    source = lock.sources[int(place.source[0])].name
    head = f"row {row}: stage {lock.stages[int(place.stage[0])].name}, source {source}"
    if is_remote(lock.location(source)):
        yield f"{head} (remote: `olm-data show row LOCK {row}` reads it)"
        return
    try:
        view = shown.view(row)
    except ValidationError as error:  # text is for people; a run needs no tokenizer
        yield f"{head} (its text cannot be shown: {error.what})"
        return
    yield f"{head}, epoch {view.epoch}, {len(view.pieces)} documents"
    for piece in view.pieces[:SHOWN_DOCUMENTS]:
        text = printable(" ".join(piece.text[:SHOWN_CHARACTERS].split()))
        more = "..." if len(piece.text) > SHOWN_CHARACTERS else ""
        yield f"    document {piece.document}, {piece.stop - piece.start:,} tokens: {text}{more}"
    if len(view.pieces) > SHOWN_DOCUMENTS:
        yield f"    ... and {len(view.pieces) - SHOWN_DOCUMENTS:,} more"
