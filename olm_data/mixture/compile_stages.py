"""Stages of a mixture, compiled: exact shares become rows and blocks, within what the sources hold.

    StageSpecs, LockSources --compile_stages--> LockStages --refuse_exhausted--> nothing, or error

A stage by shares takes as many rows as its tokens say, and its shares become counts per block. A
stage by epochs, and one whose sources were capped, is a number of rows of each source: its counts
draw exactly these, in several parts where no block does. A ramp, whose shares go from one mixture
to another, is a staircase: a part for each step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from olm_data.errors import UsageError
from olm_data.mixture.lock_format import LockSource, LockStage, part_label
from olm_data.mixture.manifest import Mixture
from olm_data.mixture.stage_spec import Share, StageSpec, capacity, fill, leaves, members
from olm_data.order.prp import MAX_ROWS
from olm_data.order.schedule import ScheduleStage, rows_by_source
from olm_data.order.slots import (
    compile_shares,
    exact_parts,
    round_amounts,
    round_counts,
    slot_table,
)

STEPS = 100
"""Steps of a ramp; inside one a source is at most 1/8 of the step's rise of its rows off."""

LONGEST = 1 << 14
"""Rows of a step, and slots of its block; a longer step repeats its block."""


@dataclass(frozen=True)
class RampStep:
    """Rows of a stage with constant counts; whole blocks.

    Attributes:
        counts: rows of each source in a block.
        wanted: share of each source: of a ramp its mean over these rows.
    """

    rows: int
    counts: tuple[int, ...]
    wanted: tuple[Fraction, ...]


def compile_stages(
    mixture: Mixture, sources: Sequence[LockSource], kept: Sequence[LockStage] = ()
) -> tuple[LockStage, ...]:
    """Compile the stages of a manifest against its sources.

    Args:
        kept: stages that come before; they are returned, too.

    Raises:
        UsageError: a stage without a row, or one whose sources cannot fill it within their
            `max_epochs` although `on_exhausted` lets others take over.
    """
    stages = list(kept)
    for index, spec in enumerate(mixture.stages):
        taken = [sum(stage.rows_by_source[s] for stage in stages) for s in range(len(sources))]
        start = sum(stage.tokens for stage in stages)
        compiled = (
            _by_epochs(mixture, index, spec, sources)
            if spec.epochs
            else _by_shares(mixture, index, spec, sources, start, taken)
        )
        labels = [stage.label for stage in stages]
        if twice := [stage.label for stage in compiled if stage.label in labels]:
            raise UsageError(
                f"{twice[0]!r} is the name of a stage, and of "
                + ("one before, which stays" if kept else "the second part of another"),
                where=mixture.where("stages", index),
                fix=f"give the stage another name, such as {spec.name}-2",
            )
        stages += compiled
    return tuple(stages)


def rows_between(start_token: int, stop_token: int, sequence_length: int) -> int:
    """Return the rows of a stage that runs from token `start_token` to `stop_token` of the run.

    Boundaries are token counts from the run's beginning, each rounded down to a whole row, so the
    roundings of earlier stages never add up.
    """
    return stop_token // sequence_length - start_token // sequence_length


def _by_shares(
    mixture: Mixture,
    index: int,
    spec: StageSpec,
    sources: Sequence[LockSource],
    start: int,
    taken: Sequence[int],
) -> list[LockStage]:
    length = mixture.sequence_length
    rows = rows_between(start, start + spec.tokens, length)
    if not rows:
        raise UsageError(
            f"stage {spec.name!r} has {spec.tokens:,} tokens, less than one row of {length:,}",
            where=mixture.where("stages", index),
            fix="give the stage more tokens, or lower sequence_length",
        )
    shares = _shares(spec.tree, sources)
    if spec.tree_to:
        steps = staircase(shares, _shares(spec.tree_to, sources), rows)
        return _parts(spec, sources, steps, spec.tokens, length)
    counts = compile_shares(shares)
    drawn = rows_by_source(ScheduleStage(rows, counts), slot_table(counts))
    if mixture.on_exhausted == "cap_and_redistribute":
        left = [_left(spec, source, t) for source, t in zip(sources, taken, strict=True)]
        if any(d > n for d, n in zip(drawn, left, strict=True)):
            limits = {source.name: n for source, n in zip(sources, left, strict=True)}
            _refuse_short(mixture, index, spec, rows, limits)
            amounts = fill(spec.tree, limits, Fraction(rows))
            exact = [amounts.get(source.name, Fraction(0)) for source in sources]
            capped = [
                s.name for s, a, w in zip(sources, exact, shares, strict=True) if a < w * rows
            ]
            steps = _exact(round_amounts(exact, rows), shares)
            return _parts(spec, sources, steps, spec.tokens, length, capped)
    return [_stage(spec, sources, RampStep(rows, counts, tuple(shares)), spec.tokens, drawn)]


def _by_epochs(
    mixture: Mixture, index: int, spec: StageSpec, sources: Sequence[LockSource]
) -> list[LockStage]:
    rows = [int(spec.epochs.get(source.name, 0) * source.rows) for source in sources]
    for source, drawn in zip(sources, rows, strict=True):
        if source.name in spec.epochs and not drawn:
            raise UsageError(
                f"stage {spec.name!r} draws no row of {source.name!r}: "
                f"{float(spec.epochs[source.name]):g} epochs of {source.rows:,} rows",
                where=mixture.where("stages", index, "epochs", source.name),
                fix=f"ask for at least 1/{source.rows:,} epoch, or leave the source out",
            )
    total = sum(rows)
    if total > MAX_ROWS:
        raise UsageError(
            f"stage {spec.name!r} has {total:,} rows; a run has at most 2^62",
            where=mixture.where("stages", index, "epochs"),
            fix="lower the epochs, or remove a source",
        )
    shares = [Fraction(drawn, total) for drawn in rows]
    length = mixture.sequence_length
    return _parts(spec, sources, _exact(rows, shares), total * length, length)


def _exact(rows: Sequence[int], wanted: Sequence[Fraction]) -> list[RampStep]:
    """Return the parts of a stage that draw exactly `rows` of each source."""
    return [RampStep(part, counts, tuple(wanted)) for part, counts in exact_parts(rows)]


def _parts(
    spec: StageSpec,
    sources: Sequence[LockSource],
    steps: Sequence[RampStep],
    tokens: int,
    length: int,
    capped: Sequence[str] = (),
) -> list[LockStage]:
    parts: list[LockStage] = []
    for step in steps:
        blocks = step.rows // sum(step.counts)
        drawn = tuple(blocks * count for count in step.counts)
        # whole rows but for the last part, which has what the stage's tokens leave over
        here = step.rows * length
        if len(parts) == len(steps) - 1:
            here = tokens - sum(stage.tokens for stage in parts)
        parts.append(_stage(spec, sources, step, here, drawn, capped, len(parts)))
    return parts


def _stage(
    spec: StageSpec,
    sources: Sequence[LockSource],
    step: RampStep,
    tokens: int,
    drawn: tuple[int, ...],
    capped: Sequence[str] = (),
    part: int = 0,
) -> LockStage:
    named, file = [source.name for source in sources], spec.weights_file
    return LockStage(
        label=part_label(spec.name, part, bool(spec.tree_to)),
        part_of=spec.name if part else None,
        rows=step.rows,
        tokens=tokens,
        block=sum(step.counts),
        counts=step.counts,
        wanted=tuple(map(ratio, step.wanted)),
        rows_by_source=drawn,
        sequence_length=spec.sequence_length,
        epochs=tuple(ratio(spec.epochs.get(n, Fraction(0))) for n in named) if spec.epochs else (),
        max_epochs={name: ratio(cap) for name, cap in sorted(spec.max_epochs.items())},
        capped=tuple(capped),
        groups=members(spec.tree) | members(spec.tree_to),
        weights_file={"name": file[0], "sha256": file[1]} if file else {},
    )


def staircase(start: Sequence[Fraction], end: Sequence[Fraction], rows: int) -> list[RampStep]:
    """Cut a ramp of `rows` rows into steps, so that no rounding adds up.

    What a source gives up to row x of a ramp of R rows is the integral a x + (b - a) x^2 / 2R of
    its share, a at the start and b at the end. After each step every source has given that, rounded
    up or down; inside a step its share is constant.

    With q = ceil(rows / (STEPS * LONGEST)) the ramp has R = floor(rows / q) units of q rows. Step i
    ends with unit floor((i + 1) R / STEPS), and up to there a source has given its integral,
    rounded up or down, times q. The fewer than q rows behind the last unit have the shares of the
    end.

    Args:
        start, end: share of each source; each sums to 1.
    """
    times = -(-rows // (STEPS * LONGEST))
    units = rows // times
    ends = sorted({units * i // STEPS for i in range(STEPS + 1)})
    upto = [
        [a * x + (b - a) * Fraction(x * x, 2 * units) for a, b in zip(start, end, strict=True)]
        for x in ends
    ]
    given, steps = [0] * len(start), list[RampStep]()
    for step, (first, last) in enumerate(pairwise(ends)):
        counts = [max(int(w) - g, 0) for w, g in zip(upto[step + 1], given, strict=True)]
        # one more unit of the sources that may give it now and must do so soonest
        more = [
            (_due(upto[step + 2 :], s, given[s] + counts[s] + 1), s)
            for s in range(len(start))
            if given[s] + counts[s] < upto[step + 1][s]
        ]
        for _, s in sorted(more)[: last - first - sum(counts)]:
            counts[s] += 1
        given = [g + count for g, count in zip(given, counts, strict=True)]
        common = math.gcd(*counts)
        wanted = [(b - a) / (last - first) for a, b in zip(upto[step], upto[step + 1], strict=True)]
        block = tuple(count // common for count in counts)
        steps.append(RampStep((last - first) * times, block, tuple(wanted)))
    if rest := rows - units * times:
        steps.append(RampStep(rest, round_counts(end, rest), tuple(end)))
    return steps


def _due(later: Sequence[Sequence[Fraction]], source: int, amount: int) -> int:
    """Return after how many later steps a source must have given an amount."""
    return next((k for k, upto in enumerate(later) if upto[source] >= amount), len(later))


def _shares(tree: Sequence[Share], sources: Sequence[LockSource]) -> list[Fraction]:
    found = leaves(tree)
    return [found.get(source.name, Fraction(0)) for source in sources]


def _left(spec: StageSpec, source: LockSource, taken: int) -> int:
    """Return the rows of a source that a stage may draw, `taken` of them being drawn before it."""
    left = max(int(source.rows * Fraction(source.max_epochs)) - taken, 0)
    cap = spec.max_epochs.get(source.name)
    return left if cap is None else min(left, int(source.rows * cap))


def _refuse_short(
    mixture: Mixture, index: int, spec: StageSpec, rows: int, limits: Mapping[str, int]
) -> None:
    """Raise where all sources of a stage together hold too few rows for it."""
    there = sum(capacity(node, limits) for node in spec.tree)
    if there >= rows:
        return
    held = ", ".join(f"{name} {limits[name]:,}" for name, share in spec.shares.items() if share)
    raise UsageError(
        f"stage {spec.name!r} has {rows:,} rows, but its sources have only {there:,} left within "
        f"their max_epochs: {held}",
        where=mixture.where("stages", index),
        why="cap_and_redistribute gives what one source lacks to the others, and these lack it too",
        fix=f"raise max_epochs of a source, or shorten the stage to "
        f"{there * mixture.sequence_length:,} tokens",
    )


def refuse_exhausted(
    mixture: Mixture, sources: Sequence[LockSource], stages: Sequence[LockStage], kept: int = 0
) -> None:
    """Raise when a source is drawn beyond its cap, with the numbers and what would make it fit.

    Args:
        kept: so many first stages are not the manifest's; they stay.
    """
    length, total = mixture.sequence_length, sum(stage.tokens for stage in stages[kept:])
    problems, raised, lowered, lines = [], [], [], []
    fits = Fraction(total)
    for index, source in enumerate(sources):
        drawn = sum(stage.rows_by_source[index] for stage in stages)
        cap = int(source.rows * Fraction(source.max_epochs))
        taken = sum(stage.rows_by_source[index] for stage in stages[:kept])
        if drawn <= max(cap, taken):
            continue
        problems.append(
            f"source {source.name!r} is exhausted: the stages draw {drawn:,} rows "
            f"({drawn * length:,} tokens), {drawn / source.rows:.2f} epochs of its "
            f"{source.rows:,} rows; max_epochs {float(Fraction(source.max_epochs)):g} allows "
            f"{cap:,} rows" + (f", and {taken:,} are drawn before" if taken else "")
        )
        lines.append(mixture.where("sources", source.name, "max_epochs"))
        raised.append(f"max_epochs: {math.ceil(Fraction(drawn, source.rows))} for {source.name!r}")
        lowered.append(f"at most {max(cap - taken, 0) * length:,} tokens of {source.name!r}")
        # each stage may draw one row more than its exact share
        room = max(cap - taken - len(stages[kept:]), 0)
        fits = min(fits, Fraction(total * room, drawn - taken))
    if problems:
        raise UsageError(
            "\n".join(problems),
            where=", ".join(lines),
            why="on_exhausted is `error`: a run never repeats data more often than you allowed"
            if mixture.on_exhausted == "error"
            else "a stage by epochs takes what it says, as does one with weights_to, so no other "
            "source can take over",
            fix=f"set {', '.join(raised)}; or draw {', '.join(lowered)} (lower the weight, or "
            f"shorten the {'stages' if kept else 'run'} to about {int(fits):,} tokens)",
        )
    _refuse_exhausted_stage(mixture, sources, stages)


def _refuse_exhausted_stage(
    mixture: Mixture, sources: Sequence[LockSource], stages: Sequence[LockStage]
) -> None:
    """Raise when a stage draws a source beyond the stage's own `max_epochs`."""
    for number, spec in enumerate(mixture.stages):
        parts = [s for s in stages if s.name == spec.name]
        for index, source in enumerate(sources):
            if source.name not in spec.max_epochs:
                continue
            drawn = sum(stage.rows_by_source[index] for stage in parts)
            limit = int(spec.max_epochs[source.name] * source.rows)
            if drawn > limit:
                raise UsageError(
                    f"stage {spec.name!r} draws {drawn:,} rows of {source.name!r}, "
                    f"{drawn / source.rows:.2f} epochs; its max_epochs "
                    f"{float(spec.max_epochs[source.name]):g} allows {limit:,}",
                    where=mixture.where("stages", number, "max_epochs"),
                    fix=f"set max_epochs: {{{source.name}: "
                    f"{math.ceil(Fraction(drawn, source.rows))}}} in the stage, or lower its share "
                    f"or epochs to at most {limit * mixture.sequence_length:,} tokens",
                )


def ratio(value: Fraction) -> str:
    """Return an exact "n/d" as the lock holds it."""
    return f"{value.numerator}/{value.denominator}"
