"""Sequence-length phases: which steps of a run see rows of which length. Pure.

    stages, kept rows, sizes of steps -> phases: neighbouring steps with one length

The schedule counts rows of the longest sequence length throughout; a step of a stage with a shorter
one cuts each of its rows into several. So a step's tokens and the state of a run do not depend on
phases, and a change of phase is an event for shapes only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from olm_data.order.skip import KeptRows
from olm_data.order.steps import StepSizes


@dataclass(frozen=True)
class Phase:
    """Neighbouring steps with the same sequence length.

    Attributes:
        first, stop: steps from 0, half-open.
        sequence_length: tokens of a row as trained.
    """

    first: int
    stop: int
    sequence_length: int


def find_phases(stages: Iterable[tuple[int, int]], kept: KeptRows, sizes: StepSizes) -> list[Phase]:
    """Return the phases of a run in order; together they hold each step once.

    A step belongs to the stage of its first row, also where it reaches into the next stage.

    Args:
        stages: rows and sequence length of each stage of the run, in order.
        kept: its rows without the skipped ones.
        sizes: rows of each step.
    """
    steps, last_row, first = sizes.count(kept.count), 0, 0
    phases: list[Phase] = []
    for rows, length in stages:
        last_row += rows
        # the first step whose first row is in the next stage or after it
        stop = min(steps, sizes.steps_to(kept.before(last_row)))
        if phases and phases[-1].sequence_length == length:
            phases[-1] = Phase(phases[-1].first, stop, length)
        elif first < stop:
            phases.append(Phase(first, stop, length))
        first = stop
    return phases


def phase_of(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase that step `step` (from 0) belongs to."""
    return phases[bisect_right(phases, step, key=lambda phase: phase.first) - 1]
