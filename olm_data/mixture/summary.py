"""The numbers of a lock, for people and scripts, and what they may not expect of it.

    Lock --summarise--> Summary: stages, sources, warnings --print_summary--> tables | JSON

Computed from the lock alone, so it says what training will do, not what was asked for.
"""

from __future__ import annotations

from fractions import Fraction

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from olm_data.counts import counted
from olm_data.dataset.view import ViewInfo
from olm_data.errors import printable
from olm_data.mixture.lock import Lock
from olm_data.mixture.lock_format import LockSource, ManifestStage, manifest_stages
from olm_data.order.slots import TOLERANCE
from olm_data.storage.store import is_remote
from olm_data.tables import table

EPOCHS_TO_WARN = 4


class DrawnSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage draws of a source that it wants.

    Attributes:
        share_wanted, share_got: of the stage's rows.
        compile_error: relative error of the share in the long run of the stage.
        capped: whether it gives less than was wanted, for want of rows.
    """

    source: str
    rows: int
    tokens: int
    epochs: float
    share_wanted: float
    share_got: float
    compile_error: float
    capped: bool


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of the manifest; `parts` are the rows of its stages in the lock."""

    name: str
    rows: int
    tokens: int
    sequence_length: int
    block: int
    parts: list[int]
    sources: list[DrawnSource]


class ViewSummary(ViewInfo, frozen=True, kw_only=True):
    """What the view of a source keeps, of how many documents."""

    of_documents: int


class SourceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A source over the whole run.

    Attributes:
        padding: share of the inputs of its rows that are padding.
        view: what its view keeps, None without a view.
    """

    source: str
    tokens_available: int
    rows_available: int
    tokens_in_no_row: int
    padding: float
    rows: int
    tokens: int
    epochs: float
    max_epochs: float
    share_got: float
    view: ViewSummary | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a lock; shares and epochs as floats."""

    digest: str
    seed: int
    sequence_length: int
    rows: int
    tokens: int
    order: str
    stages: list[StageSummary]
    sources: list[SourceSummary]
    warnings: list[str]


def summarise(lock: Lock) -> Summary:
    """Return the numbers of a lock."""
    return Summary(
        digest=lock.digest,
        seed=lock.seed,
        sequence_length=lock.sequence_length,
        rows=lock.total_rows,
        tokens=lock.total_rows * lock.sequence_length,
        order=lock.order.name,
        stages=[_stage(lock, stage) for stage in manifest_stages(lock)],
        sources=[_source(lock, index, source) for index, source in enumerate(lock.sources)],
        warnings=warnings(lock),
    )


def _stage(lock: Lock, stage: ManifestStage) -> StageSummary:
    return StageSummary(
        name=stage.name,
        rows=stage.rows,
        tokens=stage.tokens,
        sequence_length=stage.parts[0].sequence_length or lock.sequence_length,
        block=stage.parts[0].block,
        parts=[part.rows for part in stage.parts],
        sources=[
            DrawnSource(
                source=source.name,
                rows=rows,
                tokens=rows * lock.sequence_length,
                epochs=rows / source.rows,
                share_wanted=float(wanted),
                share_got=rows / stage.rows,
                compile_error=float((stage.compiled(index) - wanted) / wanted),
                capped=source.name in stage.parts[0].capped,
            )
            for index, (source, wanted, rows) in enumerate(
                zip(lock.sources, stage.wanted, stage.rows_by_source, strict=True)
            )
            if wanted
        ],
    )


def _source(lock: Lock, index: int, source: LockSource) -> SourceSummary:
    rows, length = lock.rows_drawn(index), lock.sequence_length
    return SourceSummary(
        source=source.name,
        tokens_available=source.tokens_kept,
        rows_available=source.rows,
        tokens_in_no_row=source.tokens_in_no_row(length),
        padding=source.padding(length),
        rows=rows,
        tokens=rows * length,
        epochs=rows / source.rows,
        max_epochs=float(Fraction(source.max_epochs)),
        share_got=rows / lock.total_rows,
        view=None
        if source.view is None
        else ViewSummary(of_documents=source.documents, **msgspec.structs.asdict(source.view)),
    )


def warnings(lock: Lock) -> list[str]:
    """Return what a user may not expect from this lock, one sentence each."""
    found = []
    for index, source in enumerate(lock.sources):
        rows = lock.rows_drawn(index)
        if rows > EPOCHS_TO_WARN * source.rows:
            found.append(
                f"source {source.name!r} is repeated {rows / source.rows:.2f} times; "
                f"above {EPOCHS_TO_WARN} epochs repeated data helps little"
            )
        if not any(Fraction(stage.wanted[index]) for stage in lock.stages):
            found.append(f"source {source.name!r} has a weight in no stage: it is never drawn")
        if source.view is not None and source.view.ids_shared:
            found.append(
                f"ids of source {source.name!r} are not unique: the ids to exclude stand for "
                f"{source.view.ids_shared:,} more documents than ids, all left out"
            )
        if source.view is not None and source.view.ids_unmatched:
            found.append(
                f"source {source.name!r}: {source.view.ids_unmatched:,} of the "
                f"{source.view.ids:,} ids to exclude match no document"
            )
    for stage in manifest_stages(lock):
        errors = []
        for index, source in enumerate(lock.sources):
            wanted = stage.wanted[index]
            if wanted and not stage.rows_by_source[index]:
                found.append(
                    f"source {source.name!r} is never drawn in stage {stage.name!r}: its share "
                    f"of {float(wanted):.3g} is {float(wanted * stage.rows):.3g} of "
                    f"{counted(stage.rows, 'row')}"
                )
            elif wanted:
                errors.append(abs(stage.compiled(index) - wanted) / wanted)
            if source.name in stage.parts[0].capped:
                found.append(
                    f"source {source.name!r} is capped in stage {stage.name!r}: "
                    f"{float(wanted):.2%} was wanted, {stage.rows_by_source[index]:,} of "
                    f"{counted(stage.rows, 'row')} "
                    f"({stage.rows_by_source[index] / stage.rows:.2%}) is what "
                    "max_epochs leaves; the others took over"
                )
        if not stage.exact and errors and max(errors) >= TOLERANCE:
            found.append(
                f"stage {stage.name!r}: the shares fit no block of "
                f"{counted(stage.parts[0].block, 'row')} "
                "exactly; "
                f"the largest relative error is {float(max(errors)):.2%}"
            )
    return found + _remote_warnings(lock)


def _remote_warnings(lock: Lock) -> list[str]:
    """Say what a run has to fetch of each remote source, and when that is all of it."""
    found = []
    for index, source in enumerate(lock.sources):
        if not is_remote(lock.locations[source.name]) or not lock.rows_drawn(index):
            continue
        size = np.dtype(source.dtype).itemsize
        warning = lock.order.cache_warning(
            index, source.rows, lock.sequence_length * size, source.tokens * size
        )
        if warning is not None:
            found.append(f"source {source.name!r} is remote and {warning}")
    return found


def print_summary(lock: Lock, console: Console) -> None:
    """Print the numbers of a lock as tables, one a stage and one for the whole run."""
    numbers = summarise(lock)
    for stage in numbers.stages:
        console.print(_stage_table(stage, numbers.sequence_length))
    console.print(_run_table(numbers))
    for line in view_lines(lock):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _stage_table(stage: StageSummary, sequence_length: int) -> Table:
    length = stage.sequence_length
    parts = sequence_length // length
    cut = f", each trained as {parts:,} of {length:,} tokens" if parts > 1 else ""
    drawn = table(
        (
            *("source", "rows drawn", "tokens drawn", "epochs"),
            *("share wanted", "share got", "compile error"),
        ),
        title=f"stage {stage.name}: {stage.tokens:,} tokens, {counted(stage.rows, 'row')}{cut}",
    )
    for row in stage.sources:
        drawn.add_row(
            row.source,
            f"{row.rows:,}",
            f"{row.tokens:,}",
            f"{row.epochs:.4f}",
            f"{row.share_wanted:.4%}",
            f"{row.share_got:.4%}",
            ("capped " if row.capped else "")
            + (f"{row.compile_error:+.4%}" if row.compile_error else "0"),
        )
    return drawn


def _run_table(numbers: Summary) -> Table:
    run = table(
        (
            *("source", "tokens available", "in no row", "padding", "rows drawn"),
            *("tokens drawn", "epochs", "max", "share"),
        ),
        title=f"run: {numbers.tokens:,} tokens, {counted(numbers.rows, 'row')} of "
        f"{numbers.sequence_length:,} tokens, seed {numbers.seed}, order {numbers.order}",
    )
    for source in numbers.sources:
        run.add_row(
            source.source,
            f"{source.tokens_available:,}",
            f"{source.tokens_in_no_row:,}",
            f"{source.padding:.4%}" if source.padding else "0",
            f"{source.rows:,}",
            f"{source.tokens:,}",
            f"{source.epochs:.4f}",
            f"{source.max_epochs:g}",
            f"{source.share_got:.4%}",
        )

    def total(key: str) -> str:
        return f"{sum(getattr(row, key) for row in numbers.sources):,}"

    run.add_section()
    run.add_row(
        "total",
        *(total("tokens_available"), total("tokens_in_no_row"), ""),
        *(total("rows"), total("tokens"), "", "", "100%"),
    )
    return run


def view_lines(lock: Lock) -> list[str]:
    """Return what each view kept and left out, a line a source that has one."""
    lines = []
    for source in lock.sources:
        if (view := source.view) is None:
            continue
        line = (
            f"source {source.name}: {view.documents:,} of "
            f"{counted(source.documents, 'document')} kept, "
            f"{view.tokens:,} of {source.tokens:,} tokens"
        )
        if view.where is not None:
            line += f"; {view.left_by_where:,} left out by where: {printable(view.where)}"
        if view.exclude_ids is not None:
            line += (
                f"; {view.left_by_ids:,} left out by exclude_ids, of whose {view.ids:,} ids "
                f"{view.ids_unmatched:,} matched nothing"
            )
        lines.append(line)
    return lines
