"""The rows of all ranks are the rows of the step, whatever their number."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from olm_data.order.steps import Steps, StepSizes
from olm_train.data.loader import _rows_of_ranks


@given(
    ranks=st.sampled_from([1, 2, 4]),
    rows=st.integers(64, 200),
    skip=st.tuples(st.integers(0, 60), st.integers(1, 5)),
    data=st.data(),
)
def test_slices_of_ranks_are_contiguous_and_make_up_each_step(
    ranks: int, rows: int, skip: tuple[int, int], data: st.DataObject
) -> None:
    left_out = [(skip[0], min(sum(skip), rows))] if skip[0] < rows else []
    schedule = Steps(rows, StepSizes(((0, 4), (3, 8))), left_out)
    first = data.draw(st.integers(0, schedule.count - 1))
    steps = range(first, schedule.count)
    slices = [_rows_of_ranks(schedule, steps, range(r, r + 1), ranks) for r in range(ranks)]
    together = _rows_of_ranks(schedule, steps, range(ranks), ranks)
    for step in steps:
        parts = [found[numbers == step] for numbers, found in slices]
        assert np.concatenate(parts).tolist() == schedule.rows(step).tolist()
        assert together[1][together[0] == step].tolist() == schedule.rows(step).tolist()
