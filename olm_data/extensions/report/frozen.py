"""The page of runs at one moment, in one file: what `olm-train watch` would answer.

run folders -> RunView -> all curves, and the documents of a bounded number of steps -> JSON
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from olm_data.errors import OlmError
from olm_data.extensions.report.run_view import Update, encoded, open_views
from olm_data.extensions.report.step_documents import StepDocuments

MOST_STEPS, MOST_ROWS, MOST_TEXT = 48, 4, 240
"""Steps whose documents are in the page, rows of each, characters of each piece."""


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """What a page without a server holds: for each run what is shown, and documents by step."""

    runs: list[Update]
    documents: list[dict[int, StepDocuments]]


def frozen(folders: Sequence[Path], lock: str | None) -> str:
    """Return the JSON of the page of some runs; no character of it begins a tag.

    Raises:
        InputError, ValidationError: a folder is no run's, or its log is malformed.
    """
    views = open_views(folders, lock)
    runs, documents = [], []
    for view in views:
        view.read_all()
        found = {}
        for step in view.frozen_steps(MOST_STEPS):
            with suppress(OlmError):  # the page then says what to type, and that says why
                found[step] = view.documents(step, most_rows=MOST_ROWS, most_text=MOST_TEXT)
        runs.append(view.update())
        documents.append(found)
    return encoded(Frozen(runs=runs, documents=documents))
