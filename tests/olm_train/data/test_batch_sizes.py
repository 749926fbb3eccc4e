"""A batch size that changes during a run: the same rows in the same order, cut at other places."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import random_shards, write_mixture

from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.order.steps import StepSizes
from olm_train.data import DataLoader

S = 4
ENDS, LENGTHS = (40, 45, 105, 136), (2, 4, 1, 4)


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """136 rows in four stages of different sequence lengths."""
    sources = {"web": random_shards(0, [[7] * 60, [3] * 60]), "code": random_shards(1, [[50] * 12])}
    weights = ({"web": 3, "code": 1}, {"web": 1}, {"web": 1, "code": 1}, {"code": 1})
    sizes = np.diff((0, *ENDS)).tolist()
    return write_mixture(
        tmp_path_factory.mktemp("mixture"),
        sources,
        stages=[(rows * S, weight) for rows, weight in zip(sizes, weights, strict=True)],
        sequence_length=S,
        lengths=LENGTHS,
    )


Change = tuple[int, int]
"""The first step of a size, from 0, and its rows."""


def change(rows: int, *, from_step: int) -> Change:
    return from_step - 1, rows


def loader(
    lock: Path, rows: int, changes: Sequence[Change], micro: int = 1, **options: Any
) -> DataLoader:
    sizes = {"global_batch_size": rows * S, "rank_microbatch_size": micro * S}
    found, scheduled = DataLoader(lock, **sizes, **options), StepSizes.constant(rows * S)
    for first, size in changes:
        scheduled = scheduled.then(first, size * S)
    found.schedule_sizes(scheduled)
    return found


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ranks_and_micro_batches_of_every_step_are_those_of_cutting_a_list(
    lock: Path, data: st.DataObject
) -> None:
    world = data.draw(st.integers(1, 3), label="world")
    micro = data.draw(st.integers(1, 2), label="micro")
    unit = world * micro
    sizes = [unit * n for n in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))]
    firsts = np.cumsum([data.draw(st.integers(1, 4)) for _ in sizes[1:]]).tolist()
    changes = [
        change(size, from_step=first + 1) for size, first in zip(sizes[1:], firsts, strict=True)
    ]
    cuts = sorted(data.draw(st.sets(st.integers(0, ENDS[-1]), max_size=4), label="skip"))
    skip = [list(pair) for pair in zip(cuts[::2], cuts[1::2], strict=False)]

    left = [row for row in range(ENDS[-1]) if not any(a <= row < b for a, b in skip)]
    wanted: list[list[int]] = []
    while len(left) >= (size := sizes[sum(first <= len(wanted) for first in firsts)]):
        wanted.append(left[:size])
        left = left[size:]

    ranks = [
        loader(lock, sizes[0], changes, micro, rank=r, world_size=world, skip=skip, prefetch=r)
        for r in range(world)
    ]
    assert {(one.steps, one.leftover_rows) for one in ranks} == {(len(wanted), len(left))}
    resume = data.draw(st.integers(0, len(wanted)), label="resume")
    states = []
    for step, parts in enumerate(zip(*ranks, strict=True)):
        if step == resume:
            states.append(ranks[0].state_dict())  # of one step more: it was handed out
        length = LENGTHS[int(np.searchsorted(ENDS, wanted[step][0], side="right"))]
        rows = [row for part in parts for batch in part for row in batch.rows.tolist()]
        assert rows == np.repeat(wanted[step], S // length).tolist()
        assert {len(part) for part in parts} == {len(wanted[step]) // unit}
        assert {batch.input_ids.numel() for part in parts for batch in part} == {micro * S}
        assert ranks[0].rows_of_step(step).tolist() == wanted[step]
        assert ranks[0].tokens_before(step + 1) == S * sum(map(len, wanted[: step + 1]))
    for state in states:
        alone = loader(lock, sizes[0], changes, 1, skip=skip)
        alone.load_state_dict(state)
        rest = [sorted({r for b in step for r in b.rows.tolist()}) for step in alone]
        assert rest == wanted[resume + 1 :]


def test_the_state_is_one_integer_and_fits_wherever_a_step_ends(lock: Path) -> None:
    growing = loader(lock, 4, [change(12, from_step=4)])
    steps = iter(growing)
    for _ in range(4):
        next(steps)
    state = growing.state_dict()
    assert state["rows_consumed"] == 3 * 4 + 12
    constant = loader(lock, 4, [])
    constant.load_state_dict(state)  # which sizes it had is for the trainer to know
    assert constant.step == 6
    with pytest.raises(UsageError, match="not a whole number of steps of 16 rows"):
        loader(lock, 4, [change(16, from_step=4)]).load_state_dict(state)


def test_a_past_size_need_not_fit_the_ranks_of_today_and_one_to_come_must(lock: Path) -> None:
    changes = [change(16, from_step=3), change(32, from_step=5)]
    few = loader(lock, 4, changes)
    steps = iter(few)
    for _ in range(2):
        next(steps)
    many = [loader(lock, 4, changes, micro=2, rank=r, world_size=8) for r in range(8)]
    with pytest.raises(UsageError, match="global_batch_size 16 from step 1 does not divide"):
        iter(many[0])
    for rank in many:
        rank.load_state_dict(few.state_dict())
    rows = [
        [row for part in parts for batch in part for row in sorted(set(batch.rows.tolist()))]
        for parts in zip(*many, strict=True)
    ]
    assert rows == [rank.tolist() for rank in map(few.rows_of_step, range(2, few.steps))]
    with pytest.raises(UsageError, match="global_batch_size 128 from step 5 does not") as caught:
        loader(lock, 5, changes, world_size=5)
    assert "set global_batch_size to 120 or 140 from step 5" in str(caught.value.fix)
    late = loader(lock, 6, [change(32, from_step=3), change(12, from_step=4)], world_size=6)
    with pytest.raises(UsageError, match="global_batch_size 128 from step 3 does not divide"):
        late.check_sizes(0)


def test_a_schedule_of_one_size_is_no_schedule(lock: Path) -> None:
    plain, same = loader(lock, 8, []), loader(lock, 8, [change(8, from_step=5)])
    assert plain.batch_sizes == same.batch_sizes == StepSizes.constant(8 * S)
    assert plain.phases() == same.phases()
    assert sum(stage.rows for stage in Lock.read(lock).stages) == ENDS[-1]
