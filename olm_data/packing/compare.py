"""What each packing would cost, before a byte is written.

    ends of documents, a window at a time -> Packing.pack -> Comparison -> table | page

Packs as `mix` does, so the numbers are those of the rows that would be trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path

import msgspec
import numpy as np

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.view import View
from olm_data.errors import printable
from olm_data.packing.base import Int64, PackedRows, Packing, PackingCost
from olm_data.packing.row_plan import WINDOW, documents
from olm_data.printing import Mean, Share, cells, fitted

ROW_DOCUMENTS = 32
"""Documents a row from which on the histogram counts together."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What one packing of one dataset at one sequence length comes to.

    Attributes:
        dataset: name of the source, or folder or URL of the dataset.
        packing, sequence_length: how it was packed.
        view: which of its documents, None for all.
        documents: documents looked at; `of` is how many the dataset has.
        rows: rows made.
        tokens: inputs in them.
        padding: share of the positions without a token.
        cut_needed: documents cut because they are longer than a row.
        cut_avoidable: documents cut though they fit in a row.
        dropped: tokens in no row.
        documents_per_row: mean number of pieces in a row.
        context: mean number of tokens before a token that it may see: of its document, in its row.
        attention_saved: share of causal attention work that masking documents saves.
        histogram: rows by number of pieces, 0 .. `ROW_DOCUMENTS` and more.
    """

    dataset: str
    packing: str
    sequence_length: int
    view: str | None
    documents: int
    of: int
    rows: int
    tokens: int
    padding: Share
    cut_needed: int
    cut_avoidable: int
    dropped: int
    documents_per_row: Mean
    context: Mean
    attention_saved: Share
    histogram: tuple[int, ...]


def compare(
    dataset: Dataset,
    name: str,
    packing: Packing,
    length: int,
    *,
    most_documents: int | None = None,
    view: View | None = None,
) -> Comparison:
    """Pack a dataset in one way, in memory.

    Args:
        name: of the dataset, for people.
        most_documents: look at so many documents, the first; None for all.
        view: take only a view of it, as a mixture's source does.

    Raises:
        UsageError: there is no such column.
        InputError, ValidationError: the dataset is not sound, or nothing of it is left.
    """
    cost, seen = PackingCost(), 0
    pieces = context = work = 0
    histogram = np.zeros(ROW_DOCUMENTS + 1, np.int64)
    scan = None if view is None else view.over(dataset)
    window = WINDOW if most_documents is None else min(WINDOW, most_documents)
    windows = documents(dataset, window, scan)
    if most_documents is not None:
        windows = islice(windows, -(-most_documents // window))

    def counted() -> Iterator[tuple[Int64, Int64]]:
        nonlocal seen
        for starts, sizes in windows:
            seen += len(sizes)
            yield starts, sizes

    for packed in packing.pack(dataset, counted(), length, cost):
        inputs = input_lengths(packed, length)
        pieces += int((inputs > 0).sum())
        context += int((inputs * (inputs - 1) // 2).sum())
        work += int((inputs * (inputs + 1) // 2).sum())
        held = np.minimum(packed.counts, ROW_DOCUMENTS)
        histogram += np.bincount(held, minlength=len(histogram))
    if scan is not None:
        scan.refuse_nothing("the dataset")
    whole = cost.rows * length * (length + 1) // 2
    return Comparison(
        dataset=name,
        packing=packing.name,
        sequence_length=length,
        view=None if view is None else str(view),
        documents=seen,
        of=dataset.documents,
        rows=cost.rows,
        tokens=cost.tokens,
        padding=cost.padding / max(cost.rows * length, 1),
        cut_needed=cost.cut_long,
        cut_avoidable=cost.cut_short,
        dropped=cost.dropped,
        documents_per_row=pieces / max(cost.rows, 1),
        context=context / max(cost.tokens, 1),
        attention_saved=1 - work / max(whole, 1),
        histogram=tuple(histogram.tolist()),
    )


def input_lengths(packed: PackedRows, sequence_length: int) -> np.ndarray:
    """Return int64 [p]: how many inputs each piece gives, without the last label of a full row."""
    inputs = packed.lengths.copy()
    last = np.cumsum(packed.counts) - 1
    totals = np.add.reduceat(packed.lengths, last - packed.counts + 1) if len(last) else last
    inputs[last[totals > sequence_length]] -= 1
    return inputs


def comparison_lines(found: Sequence[Comparison]) -> Iterator[str]:
    """Yield one table a dataset and sequence length."""
    for chosen in _groups(found):
        yield _title(chosen[0])
        yield from fitted(*_side_by_side(chosen), indent="  ")


def _groups(found: Sequence[Comparison]) -> list[list[Comparison]]:
    groups = groupby(found, key=lambda one: (one.dataset, one.sequence_length))
    return [list(group) for _, group in groups]


def _title(one: Comparison) -> str:
    part = f"{one.documents:,} documents"
    if one.documents < one.of:
        part = f"{part} of {one.of:,}" if one.view else f"the first {part} of {one.of:,}"
    view = f", {printable(one.view)}" if one.view else ""
    return f"{one.dataset}, rows of {one.sequence_length:,} tokens, {part}{view}"


_ROWS = (
    *("rows", "tokens=tokens in rows", "padding", "dropped=tokens in no row"),
    *("cut_needed=documents cut, too long for a row", "cut_avoidable=documents cut without need"),
    *("documents_per_row=documents in a row, mean", "context=context of a token, mean"),
    "attention_saved=attention work saved by masking",
)


def _side_by_side(chosen: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table with a column for each packing."""
    found = cells(chosen, *_ROWS)
    rows = [list(row) for row in zip(found.head, *found.rows, strict=True)]
    return ["", *(one.packing for one in chosen)], rows


def write_comparison(found: Sequence[Comparison], output: str) -> Path:
    """Write the comparisons as one HTML page with pictures."""
    from matplotlib.axes import Axes

    from olm_data.page import colours, section, svg, table, whole_numbers, write_page

    sections = []
    for chosen in _groups(found):

        def draw(axes: Axes, chosen: list[Comparison] = chosen) -> None:
            width = 0.8 / len(chosen)
            for number, (colour, one) in enumerate(zip(colours(), chosen, strict=False)):
                share = 100 * np.array(one.histogram) / max(one.rows, 1)
                middle = np.arange(len(share)) + (number - (len(chosen) - 1) / 2) * width
                axes.bar(middle, share, width, color=colour, label=one.packing)
            axes.set_xlabel(f"documents in a row ({ROW_DOCUMENTS}: and more)")
            axes.set_ylabel("share of rows, %")
            whole_numbers(axes.xaxis)
            axes.legend(frameon=False)

        head, rows = _side_by_side(chosen)
        alt = f"Documents in a row by packing: {', '.join(head[1:])}"
        sections.append(section(_title(chosen[0]), svg(draw, alt) + table(head, rows)))
    facts = [("datasets", f"{len({c.dataset for c in found})}"), ("comparisons", f"{len(found)}")]
    return write_page(output, "olm packing", facts, sections)
