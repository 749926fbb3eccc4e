"""The numbers of a lock, for people and scripts, and what they may not expect of it.

    Lock --summarise--> Summary: stages, sources, warnings --print_summary--> tables | JSON

Computed from the lock alone, so it says what training will do, not what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import ClassVar

import msgspec
import numpy as np

from olm_data.counts import counted
from olm_data.dataset.view import ViewInfo
from olm_data.mixture.lock import Lock
from olm_data.mixture.lock_format import Likeness, LockSource, LockStage, ManifestStage
from olm_data.order.slots import FIRST_BLOCK, MAX_BLOCK, TOLERANCE, largest_error
from olm_data.printing import Columns, Loss, Share, ShareError, fitted, table
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
        loss_weight: what the loss of one of its tokens is multiplied by; None: by 1.
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
    loss_weight: float | None = None


class LikeSummary(Likeness, frozen=True, kw_only=True):
    """How a source is like that of another lock; `rows` are drawn of it here."""

    source: str
    rows: int


_LIKE = (
    *("source", "documents", "rows", "rows_there=there", "tokens", "tokens_there=there"),
    *("whole_here", "not_here", "cut_here"),
)

_RUN = (
    *("source", "tokens_available=available", "tokens_in_no_row=in no row", "padding"),
    *("rows", "tokens", "epochs", "max_epochs=max", "share_got=share", "trained"),
    "loss_weight=loss weight",
    "view=kept by its view",
)


class MixtureSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a lock; shares and epochs as floats."""

    digest: str
    seed: int
    sequence_length: int
    rows: int
    tokens: int
    order: str
    stages: list[StageSummary]
    sources: list[SourceSummary]
    like: list[LikeSummary]
    warnings: list[str]

    COLUMNS: ClassVar = {
        "sources": Columns(_RUN, total=True),
        "like": Columns(_LIKE, total=True, name="documents of the other lock"),
        "warnings": None,
    }


def summarise(lock: Lock) -> MixtureSummary:
    """Return the numbers of a lock."""
    return MixtureSummary(
        digest=lock.digest,
        seed=lock.seed,
        sequence_length=lock.sequence_length,
        rows=lock.total_rows,
        tokens=lock.total_rows * lock.sequence_length,
        order=lock.order.name,
        stages=[_stage(lock, stage) for stage in lock.manifest_stages],
        sources=[_source(lock, index, source) for index, source in enumerate(lock.sources)],
        like=[
            LikeSummary(
                source=source.name, rows=lock.rows_drawn(i), **msgspec.structs.asdict(source.like)
            )
            for i, source in enumerate(lock.sources)
            if source.like is not None
        ],
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
                epochs=source.epochs(rows),
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
        epochs=source.epochs(rows),
        max_epochs=float(Fraction(source.max_epochs)) * source.epochs(source.rows),
        share_got=rows / lock.total_rows,
        trained=source.trained_share,
        loss_weight=float(Fraction(source.loss_weight)) if source.loss_weight else None,
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
        if source.epochs(rows) > EPOCHS_TO_WARN and lock.order.is_complete(index):
            found.append(
                f"source {source.name!r} is repeated {source.epochs(rows):.2f} times; "
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
    for stage in lock.manifest_stages:
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


def explain(lock: Lock) -> list[str]:
    """Return the arithmetic behind the integers of a lock, as lines indented by level."""
    rows = [
        [
            source.name,
            f"floor(({source.tokens:,} tokens - 1) / S)" if source.plan is None else "row plan",
            f"{source.rows:,}",
            f"floor({source.max_epochs} x {source.rows:,})",
            f"{int(Fraction(source.max_epochs) * source.rows):,}",
        ]
        for source in lock.sources
    ]
    lines = [f"sources, S = {lock.sequence_length:,}, packing {lock.packing.name}"]
    lines += fitted(_SOURCES, rows, left=(0, 1, 3), indent="  ")
    start, taken = 0, [0] * len(lock.sources)
    for stage in lock.manifest_stages:
        part, end = stage.parts[0], start + stage.tokens
        how = f"floor({end:,} / S) - floor({start:,} / S)"
        if part.epochs:
            whole = [
                int(Fraction(e) * s.rows) for e, s in zip(part.epochs, lock.sources, strict=True)
            ]
            how = "sum of floor(epochs x rows of the source)"
            how += f" is {sum(whole):,}, cut by a revision" * (stage.rows < sum(whole))
        blocks, rest = divmod(stage.rows, part.block)
        rows = [
            [
                source.name,
                _ratio(share),
                f"{float(share * stage.rows):,.2f}",
                f"{part.epochs[i]} x {source.rows:,}" if part.epochs else "",
                _cap(stage, source.name, taken[i]),
                "" if stage.exact else f"{blocks:,} x {part.counts[i]:,}",
                "" if stage.exact else f"{drawn - blocks * part.counts[i]:,}",
                f"{drawn:,}",
            ]
            for i, (source, share, drawn) in enumerate(
                zip(lock.sources, stage.wanted, stage.rows_by_source, strict=True)
            )
            if share or drawn
        ]
        block = f"  {stage.rows:,} rows = {blocks:,} blocks of {part.block:,} + {rest:,} rows"
        lines += [
            f"stage {stage.name}",
            f"  rows: {how} = {stage.rows:,}",
            f"  tokens: {stage.tokens:,}, from {start:,} to {end:,} of the run",
            *(_exact(lock, stage) if stage.exact else [_block(part), block]),
            *fitted(_STAGE, rows, left=(0, 4), indent="  "),
        ]
        start = end
        taken = [t + drawn for t, drawn in zip(taken, stage.rows_by_source, strict=True)]
    return lines + [
        f"rows 0 to {older.rows - 1:,} are those of lock {older.digest[:12]}: order digest "
        f"{older.order_sha256[:12]}"
        for older in lock.extends
    ]


_SOURCES = ("source", "its rows", "are", "max_epochs", "rows at most")
_STAGE = ("source", "share", "of the rows", "epochs", "cap", "in blocks", "in the rest", "drawn")


def _block(stage: LockStage) -> str:
    shares = [Fraction(wanted) for wanted in stage.wanted]
    common = math.lcm(*(share.denominator for share in shares))
    if common <= MAX_BLOCK:
        return f"  block: the common denominator {common:,} is at most 2^20: B = {stage.block:,}"
    error = largest_error(stage.counts, shares)
    return (
        f"  block: the common denominator {_short(common)} is more than 2^20; of B = "
        f"{FIRST_BLOCK:,}, doubled up to {MAX_BLOCK:,}, B = {stage.block:,} is the first with "
        f"every error below 1/10,000, or else the best: largest {float(error):.5%}; shares "
        "of B are rounded by largest remainder"
    )


def _cap(stage: ManifestStage, source: str, before: int) -> str:
    """Return why a source gives no more rows; "" where it gives its share."""
    if source not in stage.parts[0].capped:
        return ""
    own = stage.parts[0].max_epochs.get(source)
    return f"{before:,} drawn before" + (f", max_epochs {own} here" if own else "")


def _exact(lock: Lock, stage: ManifestStage) -> list[str]:
    return [
        f"  {part.label}: B = {part.block:,}; {part.rows // part.block:,} x B"
        + (f" + {part.rows % part.block:,}" if part.rows % part.block else "")
        + f" = {part.rows:,} rows; counts {', '.join(counts)}"
        for part in stage.parts
        if (counts := [f"{s.name} {n:,}" for s, n in zip(lock.sources, part.counts, strict=True)])
    ]


def _ratio(value: Fraction) -> str:
    if value.denominator == 1:
        return f"{value.numerator:,}"
    return f"{_short(value.numerator)}/{_short(value.denominator)}"


def _short(number: int) -> str:
    """Return a number in full where a person can read it, else its size."""
    return f"{number:,}" if number < 10**15 else f"(about {float(number):.3g})"


class TreeNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A source or group in a stage.

    Attributes:
        share_wanted, share_compiled, share_got: of the stage; compiled: in the long run.
        epochs: of a source.
        members: of a group.
    """

    name: str
    share_wanted: Share
    share_compiled: Share
    share_got: Share
    rows: int
    epochs: Loss | None = None
    members: tuple[TreeNode, ...] | None = None


class TreeStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of the manifest and what it draws on."""

    name: str
    rows: int
    tokens: int
    members: tuple[TreeNode, ...]


def tree(lock: Lock) -> list[TreeStage]:
    """Return the stages as trees of groups and sources, for people and scripts."""
    return [
        TreeStage(
            name=stage.name, rows=stage.rows, tokens=stage.tokens, members=_members(lock, stage)
        )
        for stage in lock.manifest_stages
    ]


def _members(lock: Lock, stage: ManifestStage) -> tuple[TreeNode, ...]:
    groups = stage.parts[0].groups
    sources = {s.name: i for i, s in enumerate(lock.sources) if stage.wanted[i]}
    inside = {member for names in groups.values() for member in names}

    def below(name: str) -> list[int]:
        if name in groups:
            return [source for member in groups[name] for source in below(member)]
        return [sources[name]] if name in sources else []

    def node(name: str) -> TreeNode:
        drawn = below(name)
        rows = sum(stage.rows_by_source[i] for i in drawn)
        known = [member for member in groups.get(name, ()) if member in {*sources, *groups}]
        return TreeNode(
            name=name,
            share_wanted=float(sum(stage.wanted[i] for i in drawn)),
            share_compiled=float(sum(stage.compiled(i) for i in drawn)),
            share_got=float(Fraction(rows, stage.rows)),
            rows=rows,
            epochs=None if name in groups else lock.sources[sources[name]].epochs(rows),
            members=tuple(map(node, known)) if name in groups else None,
        )

    return tuple(node(name) for name in (*groups, *sources) if name not in inside)


def tree_lines(stages: Sequence[TreeStage]) -> list[str]:
    """Return the trees for people, members below their group."""
    return [
        line
        for stage in stages
        for line in (
            f"stage {stage.name}: {stage.tokens:,} tokens, {counted(stage.rows, 'row')}",
            *table(
                [
                    msgspec.structs.replace(node, name="  " * depth + node.name)
                    for depth, node in walk(stage.members)
                ],
                *_TREE,
                indent="  ",
            ),
        )
    ]


_TREE = ("name=group or source", "share_wanted", "share_got", "rows", "epochs")


def walk(nodes: Sequence[TreeNode], depth: int = 0) -> Iterator[tuple[int, TreeNode]]:
    """Yield each node of a tree and how deep it is, those above first."""
    for node in nodes:
        yield depth, node
        yield from walk(node.members or (), depth + 1)
