"""A part of a step is shown without reading the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from olm_data.extensions.show.steps import Batches, show_step
from olm_data.mixture.lock import Lock
from olm_data.order.steps import StepSizes
from olm_data.rows.views import LockRows

S = 64


def test_a_part_of_a_step_reads_only_its_rows(lock_of: Callable[[str], Path]) -> None:
    lock = Lock.read(lock_of("concat"))
    view = show_step(Batches(LockRows(lock), batch_sizes=StepSizes.constant(8 * S)), 2, most=3)
    assert [row.row for row in view.rows] == [8, 9, 10]
    assert view.rows_of_step == 8
