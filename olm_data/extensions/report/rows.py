"""What a report shows of a lock's rows: what packing costs, and some rows with their documents.

    rows evenly spread over the schedule -> RowReader -> pieces, padding, attention work
                                         -> LockRows  -> text with the borders of documents

A sample of fixed size, whatever the size of the mixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from olm_data.mixture.lock import Lock
from olm_data.mixture.summary import summarise
from olm_data.page import COLOURS, fields, joined, note, part, section, svg, table, whole_numbers
from olm_data.rows.fields import IGNORED_LABEL
from olm_data.rows.reader import RowReader
from olm_data.rows.views import LockRows, RowView

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

MEASURED_ROWS = 256
SHOWN_ROWS = 6
SHOWN_PIECES = 6
SHOWN_TEXT = 280


def spread(total: int, most: int) -> np.ndarray:
    """Return int64 [min(total, most)]: row numbers evenly spread over 0 .. total - 1."""
    count = min(total, most)
    return (2 * np.arange(count, dtype=object) + 1).astype(object) * total // (2 * max(count, 1))


def packing_section(lock: Lock) -> str:
    """Return what the packing costs: of each source from the lock, of rows from a sample."""
    length = lock.sequence_length
    rows = spread(lock.total_rows, MEASURED_ROWS).astype(np.int64)
    batch = RowReader(lock).read(rows)
    # a piece starts where the position is 0; padding has no label
    pieces = (batch.positions == 0).sum(1)
    work = (batch.positions.astype(np.int64) + 1).sum()
    saved = 1 - work / (len(rows) * length * (length + 1) // 2)
    context = batch.positions.mean()
    labels = (batch.labels != IGNORED_LABEL).mean()

    def draw(axes: Axes) -> None:
        edges = np.arange(0.5, pieces.max() + 1.5)
        share, _ = np.histogram(pieces, edges)
        axes.stairs(100 * share / len(rows), edges, fill=True, color=COLOURS[0], alpha=0.8)
        axes.set_xlabel("documents in a row")
        whole_numbers(axes.xaxis)
        axes.set_ylabel("share of rows, %")

    facts = [
        ("documents in a row, mean", f"{pieces.mean():.2f}"),
        ("context of a token, mean", f"{context:,.1f} tokens"),
        ("attention work saved by masking", f"{saved:.1%}"),
        ("positions with a label", f"{labels:.3%}"),
    ]
    alt = f"Histogram of the documents in a row, {pieces.mean():.2f} on average"
    costs = ("source", "rows_available=rows", "tokens_in_no_row", "padding")
    body = fields(summarise(lock).sources, *costs) + svg(draw, alt, height=2.2)
    body += table(("measure", "value"), facts, numbers=1)
    return section(
        f"Packing: {lock.packing.name}",
        body + note(f"Lower table: {len(rows):,} rows, evenly spread over the run."),
    )


def rows_section(lock: Lock) -> str:
    """Return some rows of the run: a strip of documents, and the text at their borders."""
    shown = LockRows(lock)
    views = [shown.view(number) for number in spread(lock.total_rows, SHOWN_ROWS).tolist()]
    remark = note("Each colour is one document; attention and loss stay inside it.")
    return section("Sample rows", joined([remark, *map(_row, views)]))


def _row(view: RowView) -> Markup:
    pieces = []
    for i, piece in enumerate(view.pieces):
        size = piece.stop - piece.start
        name = piece.id or f"document {piece.document}"
        part_of = "" if size == piece.tokens else f", of {piece.tokens:,}"
        origin = f"{piece.input}, {piece.position_kind} {piece.position:,}"
        pieces.append(
            {
                "name": name,
                "size": size,
                "colour": COLOURS[i % len(COLOURS)],
                "head": f"{name} \u00b7 {size:,} tokens{part_of} \u00b7 {origin}",
                "text": _shortened(piece.text) if i < SHOWN_PIECES else None,
            }
        )
    rest = len(view.pieces) - SHOWN_PIECES
    title = (
        f"row {view.row:,}: stage {view.stage}, source {view.source}, epoch {view.epoch}, "
        f"row {view.source_row:,} of the source"
    )
    more = f"... and {rest:,} more documents in this row" if rest > 0 else ""
    return part("row", title, pieces, more)


def _shortened(text: str) -> str:
    """Return a text, or its beginning and its end: what stands at a document's borders."""
    if len(text) <= SHOWN_TEXT:
        return text
    half = SHOWN_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
