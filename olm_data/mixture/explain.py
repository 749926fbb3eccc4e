"""How each integer of a lock came out, and the tree of a mixture: what `mix` shows beside the plan.

    Lock --explain--> lines of arithmetic, stage by stage         Lock --tree--> nodes

Computed from the lock alone. Never: read data.
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
from olm_data.printing import Loss, Share, table


def explain(lock: Lock) -> list[str]:
    """Return the arithmetic behind the integers of a lock, a line each, indented by level."""
    length = lock.sequence_length
    lines = [f"sources, S = {length:,}"]
    for source in lock.sources:
        rows = (
            f"floor(({source.tokens:,} tokens - 1) / S) = {source.rows:,} rows"
            if source.plan is None
            else f"{source.rows:,} rows of its row plan ({lock.packing.name})"
        )
        cap = Fraction(source.max_epochs)
        lines.append(
            f"  {source.name}: {rows}; max_epochs {source.max_epochs}: at most "
            f"floor({_ratio(cap)} x {source.rows:,}) = {int(cap * source.rows):,} rows"
        )
    start = 0
    taken = [0] * len(lock.sources)
    for stage in manifest_stages(lock):
        lines.append(f"stage {stage.name}")
        if stage.parts[0].epochs:
            lines += [
                f"  {source.name}: floor({epochs} epochs x {source.rows:,} rows) = {rows:,} rows"
                for source, epochs, rows in zip(
                    lock.sources, stage.parts[0].epochs, stage.rows_by_source, strict=True
                )
                if rows
            ]
            lines.append(f"  rows: their sum = {stage.rows:,}; tokens: x S = {stage.tokens:,}")
        else:
            end = start + stage.tokens
            lines.append(
                f"  rows: floor({end:,} / S) - floor({start:,} / S) = {stage.rows:,} "
                f"(tokens {start:,} to {end:,} of the run)"
            )
            lines.append(f"  shares wanted: {_by_name(lock, stage.wanted)}")
        if stage.parts[0].capped:
            lines += _capped(lock, stage, taken)
        lines += _exact(lock, stage) if stage.exact else _block(lock, stage.parts[0])
        start += stage.tokens
        taken = [t + rows for t, rows in zip(taken, stage.rows_by_source, strict=True)]
    lines += [
        f"rows 0 to {older.rows - 1:,} are those of lock {older.digest[:12]}: order digest "
        f"{older.order_sha256[:12]}"
        for older in lock.extends
    ]
    return lines


def _block(lock: Lock, stage: LockStage) -> list[str]:
    shares = [Fraction(wanted) for wanted in stage.wanted]
    common = math.lcm(*(share.denominator for share in shares))
    if common <= MAX_BLOCK:
        lines = [f"  block: the common denominator {common:,} is at most 2^20: B = {stage.block:,}"]
        how = "share x B, exactly"
    else:
        errors = [
            abs(Fraction(count, stage.block) - share) / share
            for count, share in zip(stage.counts, shares, strict=True)
            if share
        ]
        lines = [
            f"  block: the common denominator {_short(common)} is more than 2^20; of B = "
            f"{FIRST_BLOCK:,}, doubled up to {MAX_BLOCK:,}, B = {stage.block:,} is the first with "
            f"every error below 1/10,000, or else the best: largest {float(max(errors)):.5%}"
        ]
        how = "share x B, rounded by largest remainder"
    lines.append(f"  counts: {how}: {_by_name(lock, stage.counts)}")
    blocks, rest = divmod(stage.rows, stage.block)
    lines.append(f"  {stage.rows:,} rows = {blocks:,} blocks of {stage.block:,} + {rest:,} rows")
    lines += [
        f"    {source.name}: {blocks:,} x {count:,} + {rows - blocks * count:,} of the first "
        f"{rest:,} slots = {rows:,} rows"
        for source, count, rows in zip(
            lock.sources, stage.counts, stage.rows_by_source, strict=True
        )
        if count or rows
    ]
    return lines


def _capped(lock: Lock, stage: ManifestStage, taken: list[int]) -> list[str]:
    lines = []
    for source, share, rows, before in zip(
        lock.sources, stage.wanted, stage.rows_by_source, taken, strict=True
    ):
        if not share:
            continue
        own = stage.parts[0].max_epochs.get(source.name)
        line = (
            f"  {source.name}: {_ratio(share)} of {stage.rows:,} = {float(share * stage.rows):,.2f}"
        )
        if source.name in stage.parts[0].capped:
            line += f", capped at {rows:,} ({before:,} drawn in earlier stages"
            line += f", max_epochs of the stage {own})" if own else ")"
        lines.append(line if source.name in stage.parts[0].capped else f"{line}, gives {rows:,}")
    return lines


def _exact(lock: Lock, stage: ManifestStage) -> list[str]:
    return [
        f"  {part.label}: B = {part.block:,}; {part.rows // part.block:,} x B = {part.rows:,} "
        f"rows; counts {_by_name(lock, part.counts)}"
        for part in stage.parts
    ]


def _by_name(lock: Lock, values: Sequence[int | Fraction]) -> str:
    pairs = zip(lock.sources, values, strict=True)
    return ", ".join(
        f"{s.name} {_ratio(v) if isinstance(v, Fraction) else f'{v:,}'}" for s, v in pairs if v
    )


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
