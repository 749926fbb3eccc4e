"""Steps, and where a document is seen, as lines for people; render.py has rows and documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from olm_data.errors import printable
from olm_data.show.documents import DocumentSightings
from olm_data.show.render import render
from olm_data.show.sightings import Sighting
from olm_data.show.steps import TRAINED, Batches, StepView

SHOWN_TEXT = 240
"""Characters of each document of a step."""

SHOWN_SIGHTINGS = 20


def step_lines(
    batches: Batches, view: StepView, *, full: bool = False, colour: bool = False
) -> Iterator[str]:
    """Yield a step as lines, each row as soon as it is read."""
    state = "" if view.state is None else f", {view.state}"
    rows = sum(view.sources.values())
    tokens = batches.batch_sizes.size(view.step - 1)
    yield (
        f"step {view.step:,} of {batches.steps.count:,}{state}: {rows:,} rows, {tokens:,} tokens"
    )
    for (stage, source), count in view.sources.items():
        yield f"  stage {printable(stage)}, source {printable(source)}: {count:,} rows"
    yield f"  order {view.order}"
    for place, who, row in zip(view.places, view.who, view.rows, strict=True):
        yield ""
        yield f"row {place} of the step{_who(who)}"
        yield render(row, full=full, colour=colour, most=SHOWN_TEXT)
    if len(view.places) < rows:
        yield f"\n{rows - len(view.places):,} more rows of this step"


def document_lines(
    found: DocumentSightings, *, colour: bool = False, text: str = "", full: bool = False
) -> Iterator[str]:
    """Yield a document and where it is seen as lines."""
    address = f"{found.source}:{found.document.document}"
    yield f"source {printable(found.source)}, address {printable(address)}"
    yield render(found.document, full=full, colour=colour, found=text, most=SHOWN_TEXT)
    if not found.sightings:
        yield "   no row of the run sees it"
        return
    rows = len({sighting.row for sighting in found.sightings})
    steps = {step["step"] for step in found.steps if step.get("step")}
    trained = {step["step"] for step in found.steps if step.get("state") == TRAINED}
    said = f"   seen in {rows:,} row{'s' * (rows != 1)} of the run"
    if any(found.steps):
        said += f", {len(steps):,} step{'s' * (len(steps) != 1)}"
    if any("state" in step for step in found.steps):
        said += f", {len(trained):,} of them trained"
    yield said + ":"
    shown = len(found.sightings) if full else SHOWN_SIGHTINGS
    for sighting, step in list(zip(found.sightings, found.steps, strict=True))[:shown]:
        yield "   " + _sighting(found, sighting, step)
    if len(found.sightings) > shown:
        yield f"   ... {len(found.sightings) - shown:,} more (--full shows all)"


def _sighting(found: DocumentSightings, sighting: Sighting, step: dict[str, Any]) -> str:
    when = ""
    if step:
        when = f"step {step['step']:,}" if step["step"] else "no step"
        when += f" ({step['state']})" if "state" in step else ""
        if "row_of_step" in step:
            when += f", row {step['row_of_step']} of it{_who(step)}"
        when += ": "
    first, end = sighting.parts
    parts = f" (shorter rows {first} to {end - 1})" if end > first + 1 else ""
    parts = f" (shorter row {first})" if first and not parts else parts
    holds = ""
    if found.hit is not None:
        holds = "; holds the text" if found.holds(sighting) else "; not the text"
    return (
        f"{when}stage {printable(sighting.stage)}, epoch {sighting.epoch}, row {sighting.row:,}: "
        f"tokens {sighting.start:,} to {sighting.stop:,} of the document, from place "
        f"{sighting.place:,}{parts}{holds}"
    )


def _who(who: dict[str, Any]) -> str:
    parts = [f"rank {who['rank']}"] if "rank" in who else []
    parts += [f"micro-batch {who['micro_batch']}"] if "micro_batch" in who else []
    return "".join(f", {part}" for part in parts)
