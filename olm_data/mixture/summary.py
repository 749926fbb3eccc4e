"""The numbers of a lock, for people and scripts, and what they may not expect of it.

    Lock --summarise--> Summary: stages, sources, warnings --print_summary--> tables | JSON

Computed from the lock alone, so it says what training will do, not what was asked for.
"""

from __future__ import annotations

from fractions import Fraction

import msgspec
import numpy as np

from olm_data.counts import counted
from olm_data.dataset.view import ViewInfo
from olm_data.mixture.lock import Lock
from olm_data.mixture.lock_format import LockSource, ManifestStage, manifest_stages
from olm_data.order.slots import TOLERANCE
from olm_data.printing import Loss, Share, ShareError, table
from olm_data.storage.store import is_remote

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
    epochs: Loss
    share_wanted: Share
    share_got: Share
    compile_error: ShareError
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

    def lines(self, row: int) -> list[str]:
        """Return the stage for people. Args: row: tokens of a row of the lock."""
        parts = row // self.sequence_length
        cut = f", each trained as {parts:,} of {self.sequence_length:,} tokens" * (parts > 1)
        title = f"stage {self.name}: {self.tokens:,} tokens, {counted(self.rows, 'row')}{cut}"
        return [title, *table(self.sources, indent="  ")]


class ViewSummary(ViewInfo, frozen=True, kw_only=True):
    """What the view of a source keeps, of how many documents and tokens."""

    of_documents: int
    of_tokens: int


class SourceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A source over the whole run.

    Attributes:
        padding: share of the inputs of its rows that are padding.
        view: what its view keeps, None without a view.
        trained: share of its dataset's tokens that is trained.
    """

    source: str
    tokens_available: int
    rows_available: int
    tokens_in_no_row: int
    padding: Share
    rows: int
    tokens: int
    epochs: Loss
    max_epochs: float
    share_got: Share
    view: ViewSummary | None
    trained: Share = 1.0


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

    def lines(self) -> list[str]:
        """Return the numbers for people: each stage, then the run."""
        stages = [line for stage in self.stages for line in stage.lines(self.sequence_length)]
        return [
            *stages,
            f"run: {self.tokens:,} tokens, {counted(self.rows, 'row')} of "
            f"{self.sequence_length:,} tokens, seed {self.seed}, order {self.order}",
            *table(self.sources, *_RUN, total=True, indent="  "),
            *(
                f"source {source.source}: {_kept(source.view)}"
                for source in self.sources
                if source.view
            ),
            *(
                f"source {source.source}: {source.trained:.1%} of its tokens are trained"
                for source in self.sources
                if source.trained < 1
            ),
        ]


_RUN = (
    *("source", "tokens_available=available", "tokens_in_no_row=in no row", "padding"),
    *("rows", "tokens", "epochs", "max_epochs=max", "share_got=share"),
)


def _kept(view: ViewSummary) -> str:
    """Return what a view kept and left out."""
    text = (
        f"{view.documents:,} of {counted(view.of_documents, 'document')} kept, "
        f"{view.tokens:,} of {view.of_tokens:,} tokens"
    )
    if view.where is not None:
        text += f"; {view.left_by_where:,} left out by where: {view.where}"
    if view.exclude_ids is not None:
        text += (
            f"; {view.left_by_ids:,} left out by exclude_ids, of whose {view.ids:,} ids "
            f"{view.ids_unmatched:,} matched nothing"
        )
    return text


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
        trained=1.0 if source.trained is None else source.trained / source.tokens,
        view=None
        if source.view is None
        else ViewSummary(
            of_documents=source.documents,
            of_tokens=source.tokens,
            **msgspec.structs.asdict(source.view),
        ),
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
