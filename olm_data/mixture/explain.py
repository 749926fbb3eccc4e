"""How each integer of a lock came out, and the tree of a mixture: what `mix` shows beside the plan.

    Lock --explain--> lines of arithmetic, stage by stage         Lock --tree--> nested dicts

Computed from the lock alone. Never: read data.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from rich.markup import escape
from rich.tree import Tree

from olm_data.mixture.lock import Lock
from olm_data.mixture.lock_format import LockStage
from olm_data.mixture.manifest_stages import ManifestStage, manifest_stages
from olm_data.order.slots import FIRST_BLOCK, MAX_BLOCK


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


def _by_name(lock: Lock, values: Any) -> str:
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


def tree(lock: Lock) -> list[dict[str, Any]]:
    """Return the stages as trees of groups and sources, for people and scripts.

    Each node has `name`, `share_wanted`, `share_compiled` (in the long run) and `share_got` of the
    stage, `rows`, and `members` (a group) or `epochs` (a source).
    """
    return [
        {
            "name": stage.name,
            "rows": stage.rows,
            "tokens": stage.tokens,
            "members": _members(lock, stage),
        }
        for stage in manifest_stages(lock)
    ]


def _members(lock: Lock, stage: ManifestStage) -> list[dict[str, Any]]:
    sources: dict[str, dict[str, Any]] = {}
    for index, source in enumerate(lock.sources):
        if stage.wanted[index]:
            rows = stage.rows_by_source[index]
            sources[source.name] = {
                "name": source.name,
                "share_wanted": stage.wanted[index],
                "share_compiled": stage.compiled(index),
                "share_got": Fraction(rows, stage.rows),
                "rows": rows,
                "epochs": rows / source.rows,
            }
    groups = stage.parts[0].groups
    inside = {member for names in groups.values() for member in names}

    def node(name: str) -> dict[str, Any]:
        if name in sources:
            return sources[name]
        members = [node(member) for member in groups[name] if member in {*sources, *groups}]
        return {
            "name": name,
            **{
                key: sum(member[key] for member in members)
                for key in ("share_wanted", "share_compiled", "share_got", "rows")
            },
            "members": members,
        }

    top = [name for name in (*groups, *sources) if name not in inside]
    return [_floats(node(name)) for name in top]


def _floats(node: dict[str, Any]) -> dict[str, Any]:
    shares = {key: float(node[key]) for key in ("share_wanted", "share_compiled", "share_got")}
    below = {"members": [_floats(m) for m in node["members"]]} if "members" in node else {}
    return node | shares | below


def draw(lock: Lock) -> Tree:
    """Return the tree for a terminal."""
    top = Tree(
        f"[bold]run[/] {lock.total_rows * lock.sequence_length:,} tokens, {lock.total_rows:,} rows"
    )
    for stage in tree(lock):
        branch = top.add(
            f"[bold]{escape(stage['name'])}[/] {stage['tokens']:,} tokens, {stage['rows']:,} rows"
        )
        for node in stage["members"]:
            _draw(branch, node)
    return top


def _draw(branch: Tree, node: dict[str, Any]) -> None:
    text = f"{node['share_wanted']:.2%} {escape(node['name'])}"
    if abs(node["share_got"] - node["share_wanted"]) >= 0.00005:
        text += f" (got {node['share_got']:.2%})"
    text += f", {node['rows']:,} rows"
    if "epochs" in node:
        text += f", {node['epochs']:.2f} epochs"
    below = branch.add(text, highlight=False)
    for member in node.get("members", []):
        _draw(below, member)
