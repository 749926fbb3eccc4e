"""Stages of a mixture, compiled: exact shares become rows and blocks, within what the sources hold.

    StageSpecs, LockSources --compile_stages--> LockStages --refuse_exhausted--> nothing or error

Never: open a dataset or read a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from olm_data.errors import UsageError
from olm_data.mixture.lock import LockSource, LockStage
from olm_data.mixture.manifest import Mixture
from olm_data.mixture.order import Stage, rows_by_source
from olm_data.mixture.packing import rows_between
from olm_data.mixture.shares import compile_shares, slot_table


def compile_stages(mixture: Mixture) -> tuple[LockStage, ...]:
    """Compile the stages of a manifest; one without a row is refused."""
    stages: list[LockStage] = []
    start = 0
    for index, spec in enumerate(mixture.stages):
        rows = rows_between(start, start + spec.tokens, mixture.sequence_length)
        start += spec.tokens
        if not rows:
            raise UsageError(
                f"stage {spec.name!r} has {spec.tokens:,} tokens, less than one row of "
                f"{mixture.sequence_length:,}",
                where=mixture.where("stages", index),
                fix="give the stage more tokens, or lower sequence_length",
            )
        shares = [spec.shares.get(source.name, Fraction(0)) for source in mixture.sources]
        counts = compile_shares(shares).counts
        stages.append(
            LockStage(
                name=spec.name,
                rows=rows,
                tokens=spec.tokens,
                block=sum(counts),
                counts=counts,
                wanted=tuple(map(ratio, shares)),
                rows_by_source=rows_by_source(Stage(rows, counts), slot_table(counts)),
                sequence_length=spec.sequence_length,
            )
        )
    return tuple(stages)


def refuse_exhausted(
    mixture: Mixture, sources: Sequence[LockSource], stages: Sequence[LockStage]
) -> None:
    """Raise when a source is drawn beyond its cap, with the numbers and what would make it fit."""
    length, total = mixture.sequence_length, sum(stage.tokens for stage in mixture.stages)
    problems, raised, lowered, places = [], [], [], []
    fits = Fraction(total)
    for index, source in enumerate(sources):
        drawn = sum(stage.rows_by_source[index] for stage in stages)
        cap = int(source.rows * Fraction(source.max_epochs))
        if drawn <= cap:
            continue
        problems.append(
            f"source {source.name!r} is exhausted: the stages draw {drawn:,} rows "
            f"({drawn * length:,} tokens), {drawn / source.rows:.2f} epochs of its "
            f"{source.rows:,} rows; max_epochs {float(Fraction(source.max_epochs)):g} allows "
            f"{cap:,} rows"
        )
        places.append(mixture.where("sources", source.name, "max_epochs"))
        raised.append(f"max_epochs: {math.ceil(Fraction(drawn, source.rows))} for {source.name!r}")
        lowered.append(f"at most {cap * length:,} tokens of {source.name!r}")
        # each stage may draw one row more than its exact share
        fits = min(fits, Fraction(total * max(cap - len(stages), 0), drawn))
    if problems:
        raise UsageError(
            "\n".join(problems),
            where=", ".join(places),
            why="on_exhausted is `error`: a run never repeats data more often than you allowed",
            fix=f"set {', '.join(raised)}; or draw {', '.join(lowered)} (lower the weight, or "
            f"shorten the run to about {int(fits):,} tokens)",
        )


def ratio(value: Fraction) -> str:
    """Return an exact "n/d" as the lock holds it."""
    return f"{value.numerator}/{value.denominator}"
