"""How each integer of a lock came out, and the tree of a mixture: what `mix` shows beside the plan.

    Lock --explain--> lines of arithmetic, stage by stage         Lock --tree--> nodes

Computed from the lock alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec

from olm_data.counts import counted
from olm_data.mixture.lock import Lock
from olm_data.mixture.lock_format import LockStage, ManifestStage, manifest_stages
from olm_data.order.slots import FIRST_BLOCK, MAX_BLOCK
from olm_data.printing import Loss, Share, fitted, table


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
    for stage in manifest_stages(lock):
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
    errors = [
        abs(Fraction(count, stage.block) - share) / share
        for count, share in zip(stage.counts, shares, strict=True)
        if share
    ]
    return (
        f"  block: the common denominator {_short(common)} is more than 2^20; of B = "
        f"{FIRST_BLOCK:,}, doubled up to {MAX_BLOCK:,}, B = {stage.block:,} is the first with "
        f"every error below 1/10,000, or else the best: largest {float(max(errors)):.5%}; shares "
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
        for stage in manifest_stages(lock)
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
            epochs=None if name in groups else rows / lock.sources[sources[name]].rows,
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
