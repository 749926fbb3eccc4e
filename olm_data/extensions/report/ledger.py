"""What a report shows of a run's loss ledger: curves by source and position, and documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from olm_data.page import COLOURS, fields, joined, note, section, svg, whole_numbers
from olm_data.run_log.ledger import ledger_files
from olm_data.show.ledger_summary import LEARNED, Curve, LedgerSummary, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = ("-", "--", ":", "-.")
MOST_SHOWN = 10
"""Documents in a table."""


def ledger_section(name: str, folder: Path) -> str:
    """Return what the ledger of a run says; "" without one.

    Raises:
        ValidationError: a file is not one that a run writes.
    """
    if not ledger_files(folder):
        return ""
    view = summarise(folder, MOST_SHOWN)
    parts = [
        _curves("source", view, view.sources),
        _curves("place in the document", view, view.positions),
    ]
    if view.missing:
        parts.append(note(f"{view.missing:,} steps are not in the ledger."))
    if view.repeated:
        parts += [
            note(f"{view.repeated:,} documents were seen in two epochs or more. Never learned:"),
            fields(view.never_learned, *LEARNED),
            note("Memorised at the second epoch:"),
            fields(view.memorised, *LEARNED),
        ]
    return section(f"Loss by document of {name}", joined(parts))


def _curves(what: str, view: LedgerSummary, curves: Sequence[Curve]) -> str:
    def draw(axes: Axes) -> None:
        for number, (curve, colour) in enumerate(zip(curves, cycle(COLOURS), strict=False)):
            pairs = zip(view.until, curve.losses, strict=True)
            known = [(step, loss) for step, loss in pairs if loss is not None]
            steps, losses = [step for step, _ in known], [loss for _, loss in known]
            style = _STYLES[number // len(COLOURS) % len(_STYLES)]
            axes.plot(
                steps, losses, style, color=colour, marker="o", markersize=3, label=curve.name
            )
        axes.set_xlabel("step")
        axes.set_ylabel("nats a label")
        whole_numbers(axes.xaxis)
        axes.legend(frameon=False, fontsize=7)

    ends = [f"{curve.name} ends at {curve.losses[-1]}" for curve in curves]
    return svg(draw, f"Loss by {what} over the steps: {'; '.join(ends)}", height=2.4)
