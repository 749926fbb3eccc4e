"""Promises of the order of arriving text: exact in each group, and blind to what comes later."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import prp1_reference as reference

from olm_data.dataset.arrived import border
from olm_data.errors import UsageError
from olm_data.order.arriving import Arriving
from olm_data.order.prp import round_keys
from olm_data.order.schedule import Schedule, ScheduleStage


def schedule(bounds: list[int], *, ended: bool, rows: int) -> Schedule:
    order = Arriving(bounds=(tuple(bounds),), ended=(ended,))
    return Schedule(7, [("web", bounds[-1])], [ScheduleStage(rows, (1,))], order)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 60), st.integers(1, 40))
def test_rows_of_a_group_are_permuted_and_what_arrives_later_changes_none(
    sizes: list[int], first: int, later: int
) -> None:
    bounds = [*accumulate([first, *sizes])]
    there, total = bounds[-1], bounds[-1] + later
    now = schedule(bounds, ended=False, rows=2 * total)
    then = schedule([*bounds, total], ended=True, rows=2 * total)
    rows = now.locate(np.arange(there)).row
    assert np.array_equal(rows, then.locate(np.arange(there)).row)
    for start, stop in zip([0, *bounds], bounds, strict=False):
        assert sorted(rows[start:stop]) == [*range(start, stop)]
    assert now.rows_within(np.array([there])) == there
    seen, _ = now.sightings(0, np.arange(there))
    assert np.array_equal(seen, np.arange(there))  # no second epoch is known yet
    again = then.locate(np.arange(total, 2 * total)).row
    assert sorted(again) == [*range(total)]
    for row in {0, there - 1, total - 1}:
        assert row in then.locate(then.rows_of(0, row)).row
    with pytest.raises(UsageError, match="still to arrive"):
        now.locate(np.array([there]))


def test_it_is_the_specification() -> None:
    keys = [int(k) for k in round_keys(7, "web", 0)]
    for row, group, start, size in ((3, 0, 0, 11), (15, 1, 11, 9), (19, 1, 11, 9)):
        inside = [reference.mix((k + group + 1) & reference.MASK) for k in keys]
        wanted = start + reference.permute(row - start, size, inside)
        assert schedule([11, 20], ended=True, rows=20).locate(np.array([row])).row == wanted


def test_groups_grow_by_half() -> None:
    assert [border(n) for n in range(1, 12)] == [1, 2, 3, 4, 6, 9, 13, 19, 28, 42, 63]
