"""The documents of a step of a run, as its page shows them.

    line of the step in the log + lock -> rows -> pieces of documents with the beginning of each
    ledger, where there is one         -> what each of them cost, and what raised the loss

The rows are those that the log names, and their digest must be the one it has: what is shown is
what was trained on. All texts are made harmless here; the page shows them as text.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from olm_data.errors import InputError, OlmError, ValidationError, printable, shown
from olm_data.extensions.show.ledger import PieceLoss, StepLosses, show_step_losses
from olm_data.extensions.show.steps import NOT_TAKEN, TRAINED
from olm_data.extensions.show.token_text import trained_runs, trained_tokens
from olm_data.rows.views import DocumentView, LockRows
from olm_data.run_log.log import Step
from olm_data.tokenizer.tokenizer import TokenizerSpec

T = TypeVar("T")

MOST_ROWS = 1 << 20
"""Rows of a step; a log may say anything."""
MOST_RAISED = 10
"""Sources, and documents, that are named because they raised the loss."""


def harmless(value: T) -> T:
    """Return a value of Structs and plain values in which no text acts on a terminal or page."""
    made: Any = value
    if isinstance(value, str):
        made = shown(value)
    elif isinstance(value, dict):
        made = {harmless(key): harmless(each) for key, each in value.items()}
    elif isinstance(value, (list, tuple)):
        made = type(value)(map(harmless, value))
    elif isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        made = type(value)(**harmless(fields))
    found: T = made
    return found


class DocumentPiece(msgspec.Struct, frozen=True):
    """A piece of a document: where it comes from, how many tokens it is, how its text begins.

    `loss` is nats a label in that step, by the ledger; None where that does not say. `runs` is the
    text in stretches, each with whether its tokens are trained; empty where all are.
    """

    name: str
    origin: str
    tokens: int
    text: str
    cut: bool
    loss: float | None = None
    trained: int | None = None
    runs: list[tuple[str, bool]] = []


class StepRow(msgspec.Struct, frozen=True):
    """A row of a step."""

    row: int
    origin: str
    pieces: list[DocumentPiece]


class StepDocuments(msgspec.Struct, frozen=True, kw_only=True):
    """What a step was trained on.

    Attributes:
        state: "trained" or "not taken".
        sources: (stage, source, rows) of the whole step.
        rows: the first few.
        rows_of_step: how many there are.
        losses: what raised the loss, by the ledger; None without one that has the step.
    """

    step: int
    state: str
    sources: list[tuple[str, str, int]]
    rows: list[StepRow]
    rows_of_step: int
    losses: StepLosses | None = None


def step_documents(
    rows: LockRows, step: Step, *, most_rows: int, most_text: int, ledger: Path | None = None
) -> StepDocuments:
    """Return the documents of a logged step.

    Args:
        ledger: folder of a run whose ledger says what they cost, if it has one.
        most_rows: rows that are shown.
        most_text: characters of each piece.

    Raises:
        InputError: the log names more rows than a step has, or rows that the lock has not.
        ValidationError: by its digest, the step was made of other rows.
    """
    first, end = step.rows
    if end > rows.total or end - first > MOST_ROWS:
        raise InputError(f"the log names rows {first:,} to {end:,}; the lock has {rows.total:,}")
    numbers = np.arange(first, end)
    for low, high in step.skipped:
        numbers = numbers[(numbers < low) | (numbers >= high)]
    if step.order is not None and not rows.lock.gave(step.order, numbers):
        raise ValidationError(
            f"step {step.step:,} of the run was not made of these rows",
            fix="olm-data verify RUN compares all of the log with the lock",
        )
    found = rows.schedule.locate(numbers)
    costs = _Costs(ledger, step.step)
    return StepDocuments(
        step=step.step,
        state=TRAINED if step.taken else NOT_TAKEN,
        sources=[
            (printable(stage), printable(source), count)
            for (stage, source), count in rows.lock.tally(found).items()
        ],
        rows=[_row(rows, int(number), most_text, costs) for number in numbers[:most_rows]],
        rows_of_step=len(numbers),
        losses=costs.losses,
    )


class _Costs:
    """What the pieces of a step cost, by the ledger of a run.

    Attributes:
        losses: what raised the loss of the step; None where the ledger does not say.
    """

    def __init__(self, folder: Path | None, step: int) -> None:
        self.losses: StepLosses | None = None
        self._pieces: dict[tuple[int, str], list[PieceLoss]] = {}
        if folder is None:
            return
        with suppress(OlmError):  # no ledger, or the step is not in it yet
            found = show_step_losses(folder, step, MOST_ROWS)
            for piece in found.top:
                self._pieces.setdefault((piece.row, piece.address), []).append(piece)
            sources, top = found.sources[:MOST_RAISED], found.top[:MOST_RAISED]
            self.losses = harmless(msgspec.structs.replace(found, sources=sources, top=top))

    def of(self, row: int, source: str, view: DocumentView) -> float | None:
        """Return the nats a label of a piece of a row; None: unknown."""
        mine = [
            piece
            for piece in self._pieces.get((row, f"{source}:{view.document}"), ())
            if view.start <= piece.start < view.stop
        ]
        labels = sum(piece.labels for piece in mine)
        return sum(p.loss * p.labels for p in mine) / labels if labels else None


def _row(rows: LockRows, number: int, most_text: int, costs: _Costs) -> StepRow:
    view = rows.view(number)
    origin = f"stage {view.stage}, source {view.source}, epoch {view.epoch}"
    tokenizer, source = rows.tokenizer_of(view.source), view.source or ""
    pieces = [
        _piece(piece, most_text, costs.of(number, source, piece), tokenizer)
        for piece in view.pieces
    ]
    return StepRow(number, printable(origin), pieces)


def _piece(
    piece: DocumentView, most: int, loss: float | None, tokenizer: TokenizerSpec
) -> DocumentPiece:
    name = piece.id or f"document {piece.document:,}"
    part = f"tokens {piece.start:,} to {piece.stop:,} of {piece.tokens:,}"
    origin = f"{piece.input}, {piece.position_kind} {piece.position:,}; {part}"
    text, cut, size = _lines(piece.text[:most]), len(piece.text) > most, piece.stop - piece.start
    found = DocumentPiece(printable(name), printable(origin), size, text, cut, loss)
    if piece.trained is UNSET:
        return found
    runs = [(_lines(run), on) for run, on in trained_runs(piece, tokenizer, 0, most)]
    return msgspec.structs.replace(found, trained=trained_tokens(piece), runs=runs)


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
