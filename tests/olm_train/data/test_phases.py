"""Batch sizes and sequence lengths that change during a run: the same rows and tokens, cut anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import mix_datasets, random_shards, write_mixture

from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.order.steps import Phase, StepSizes
from olm_data.rows.reader import RowReader
from olm_train.data import Batch, DataLoader

S = 16
STAGES = [
    (40 * S, {"web": 3, "code": 1}),
    (5 * S, {"web": 1}),
    (60 * S + 3, {"web": 1, "code": 1}),
    (31 * S, {"code": 1}),
]
LENGTHS = (2, 16, 4, 16)
ROWS = 136
FIELDS = ("rows", "input_ids", "labels", "doc_start", "positions", "cu_seqlens")


@pytest.fixture(scope="module", params=["concat", "best_fit"])
def locks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The same mixture with phases and without."""
    rng = np.random.default_rng(0)
    sources = {
        name: random_shards(i, rng.integers(1, 40, size=(3, 12)).tolist())
        for i, name in enumerate(("web", "code"))
    }
    folder = tmp_path_factory.mktemp("phases")
    common = {"stages": STAGES, "sequence_length": S, "packing": request.param}
    phased = write_mixture(folder / "phased", sources, lengths=LENGTHS, **common)  # type: ignore[arg-type]
    (folder / "whole").mkdir()
    for name in sources:
        (folder / "whole" / name).symlink_to(folder / "phased" / name)
    return phased, mix_datasets(folder / "whole", list(sources), **common)  # type: ignore[arg-type]


def loader(lock: Path, rows: int, micro: int = 1, **options: object) -> DataLoader:
    sizes = {"global_batch_size": rows * S, "rank_microbatch_size": micro * S}
    return DataLoader(lock, **sizes, **options)  # type: ignore[arg-type]


def flat(batches: list[Batch], name: str) -> list[int]:
    return [value for batch in batches for value in getattr(batch, name).flatten().tolist()]


@settings(max_examples=10)
@given(data=st.data())
def test_every_token_and_label_comes_once_in_the_same_step_whatever_the_phases_and_ranks(
    locks: tuple[Path, Path], data: st.DataObject
) -> None:
    world = data.draw(st.integers(1, 3), label="world")
    micro = data.draw(st.integers(1, 2), label="micro")
    rows = world * micro * data.draw(st.integers(1, 4), label="accumulation")
    cuts = sorted(data.draw(st.sets(st.integers(0, ROWS), max_size=4), label="skip"))
    skip = [list(pair) for pair in zip(cuts[::2], cuts[1::2], strict=False)]
    phased = [
        loader(locks[0], rows, micro, rank=r, world_size=world, skip=skip) for r in range(world)
    ]
    whole = loader(locks[1], rows, rows, skip=skip)
    lock, ends = Lock.read(locks[0]), np.cumsum([s.rows for s in Lock.read(locks[0]).stages])
    steps = 0
    for step, (batches, ranks) in enumerate(zip(whole, zip(*phased, strict=True), strict=True)):
        parts = [batch for rank in ranks for batch in rank]
        for name in ("input_ids", "labels"):
            assert flat(parts, name) == flat(batches, name)
        first = int(whole.rows_of_step(step)[0])
        length = lock.sequence_lengths[int(np.searchsorted(ends, first, side="right"))]
        assert {batch.input_ids.shape for batch in parts} == {(micro * S // length, length)}
        assert {batch.max_seqlen for batch in parts} == {length}
        assert flat(parts, "rows") == np.repeat(whole.rows_of_step(step), S // length).tolist()
        steps += 1
    assert steps == whole.steps == phased[0].steps


def test_each_phase_has_one_shape_and_documents_never_reach_over_its_rows(
    locks: tuple[Path, Path],
) -> None:
    batches = loader(locks[0], 8, 2)
    shapes: dict[int, set[object]] = {}
    for micro_batches in batches:
        for batch in micro_batches:
            tensors = [getattr(batch, name) for name in FIELDS]
            shapes.setdefault(batch.max_seqlen, set()).add(tuple(t.shape for t in tensors))
            pieces = batch.cu_seqlens.diff()
            assert pieces.max() <= batch.max_seqlen
            restarts = (batch.positions.flatten() == 0).nonzero().flatten()
            assert restarts.tolist() == batch.cu_seqlens[:-1][pieces > 0].tolist()
            assert set(restarts.tolist()) >= set(range(0, 2 * S, batch.max_seqlen))
    assert {length: len(seen) for length, seen in shapes.items()} == {2: 1, 4: 1, 16: 1}


def test_a_step_has_the_phase_of_its_first_row(locks: tuple[Path, Path]) -> None:
    # stages begin at rows 0, 40, 45 and 105
    assert loader(locks[0], 8).phases() == [
        Phase(0, 5, 2),
        Phase(5, 6, 16),
        Phase(6, 14, 4),
        Phase(14, 17, 16),
    ]
    # a stage in which no step begins has no phase; neighbours of one length are one phase
    assert loader(locks[0], 68).phases() == [Phase(0, 1, 2), Phase(1, 2, 4)]
    assert loader(locks[0], 34).phases() == [Phase(0, 2, 2), Phase(2, 4, 4)]
    # skipped rows move the steps
    assert loader(locks[0], 8, skip=[[0, 40]]).phases()[0] == Phase(0, 1, 16)
    assert loader(locks[1], 8).phases() == [Phase(0, 17, 16)]


@pytest.mark.parametrize("stop", [5, 14])
def test_a_run_goes_on_over_a_change_of_phase_with_another_world_size(
    locks: tuple[Path, Path], stop: int
) -> None:
    undisturbed = [list(step) for step in loader(locks[0], 8, 2)]
    first = loader(locks[0], 8, 2, prefetch=3)
    iterator = iter(first)
    for _ in range(stop):
        next(iterator)
    state = first.state_dict()
    ranks = [loader(locks[0], 8, 2, rank=r, world_size=2) for r in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for step, parts in enumerate(zip(*ranks, strict=True), start=stop):
        resumed = [batch for part in parts for batch in part]
        for one, other in zip(undisturbed[step], resumed, strict=True):
            for name in FIELDS:
                assert getattr(one, name).equal(getattr(other, name))
    with pytest.raises(ValidationError, match="another mixture") as caught:
        loader(locks[1], 8).load_state_dict(state)
    assert "cut into rows of 2" in str(caught.value.where)


def test_micro_batches_hold_whole_rows_of_the_longest_length(locks: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="not a multiple of the sequence length 16"):
        DataLoader(locks[0], global_batch_size=8 * S, rank_microbatch_size=S // 2)


def test_a_lock_without_phases_is_the_lock_it_was(locks: tuple[Path, Path]) -> None:
    assert b"sequence_length" in locks[0].read_bytes().split(b'"stages"')[1]
    assert b"sequence_length" not in locks[1].read_bytes().split(b'"stages"')[1]
    one, other = (RowReader(lock) for lock in locks)
    place, same = (r.schedule.locate(np.arange(r.total_rows)) for r in (one, other))
    for name in ("stage", "source", "epoch", "row"):
        np.testing.assert_array_equal(getattr(place, name), getattr(same, name))


ROW = 4
ENDS, OF_STAGES = (40, 45, 105, 136), (2, 4, 1, 4)


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """136 rows in four stages of different sequence lengths."""
    sources = {"web": random_shards(0, [[7] * 60, [3] * 60]), "code": random_shards(1, [[50] * 12])}
    weights = ({"web": 3, "code": 1}, {"web": 1}, {"web": 1, "code": 1}, {"code": 1})
    sizes = np.diff((0, *ENDS)).tolist()
    return write_mixture(
        tmp_path_factory.mktemp("mixture"),
        sources,
        stages=[(rows * ROW, weight) for rows, weight in zip(sizes, weights, strict=True)],
        sequence_length=ROW,
        lengths=OF_STAGES,
    )


Change = tuple[int, int]
"""The first step of a size, from 0, and its rows."""


def change(rows: int, *, from_step: int) -> Change:
    return from_step - 1, rows


def scheduled(
    lock: Path, rows: int, changes: Sequence[Change], micro: int = 1, **options: Any
) -> DataLoader:
    sizes = {"global_batch_size": rows * ROW, "rank_microbatch_size": micro * ROW}
    found, scheduled = DataLoader(lock, **sizes, **options), StepSizes.constant(rows * ROW)
    for first, size in changes:
        scheduled = scheduled.then(first, size * ROW)
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
        scheduled(lock, sizes[0], changes, micro, rank=r, world_size=world, skip=skip, prefetch=r)
        for r in range(world)
    ]
    assert {(one.steps, one.leftover_rows) for one in ranks} == {(len(wanted), len(left))}
    resume = data.draw(st.integers(0, len(wanted)), label="resume")
    states = []
    for step, parts in enumerate(zip(*ranks, strict=True)):
        if step == resume:
            states.append(ranks[0].state_dict())  # of one step more: it was handed out
        length = OF_STAGES[int(np.searchsorted(ENDS, wanted[step][0], side="right"))]
        rows = [row for part in parts for batch in part for row in batch.rows.tolist()]
        assert rows == np.repeat(wanted[step], ROW // length).tolist()
        assert {len(part) for part in parts} == {len(wanted[step]) // unit}
        assert {batch.input_ids.numel() for part in parts for batch in part} == {micro * ROW}
        assert ranks[0].rows_of_step(step).tolist() == wanted[step]
        assert ranks[0].tokens_before(step + 1) == ROW * sum(map(len, wanted[: step + 1]))
    for state in states:
        alone = scheduled(lock, sizes[0], changes, 1, skip=skip)
        alone.load_state_dict(state)
        rest = [sorted({r for b in step for r in b.rows.tolist()}) for step in alone]
        assert rest == wanted[resume + 1 :]


def test_the_state_is_one_integer_and_fits_wherever_a_step_ends(lock: Path) -> None:
    growing = scheduled(lock, 4, [change(12, from_step=4)])
    steps = iter(growing)
    for _ in range(4):
        next(steps)
    state = growing.state_dict()
    assert state["rows_consumed"] == 3 * 4 + 12
    constant = scheduled(lock, 4, [])
    constant.load_state_dict(state)  # which sizes it had is for the trainer to know
    assert constant.step == 6
    with pytest.raises(UsageError, match="not a whole number of steps of 16 rows"):
        scheduled(lock, 4, [change(16, from_step=4)]).load_state_dict(state)


def test_a_past_size_need_not_fit_the_ranks_of_today_and_one_to_come_must(lock: Path) -> None:
    changes = [change(16, from_step=3), change(32, from_step=5)]
    few = scheduled(lock, 4, changes)
    steps = iter(few)
    for _ in range(2):
        next(steps)
    many = [scheduled(lock, 4, changes, micro=2, rank=r, world_size=8) for r in range(8)]
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
        scheduled(lock, 5, changes, world_size=5)
    assert "set global_batch_size to 120 or 140 from step 5" in str(caught.value.fix)
    late = scheduled(lock, 6, [change(32, from_step=3), change(12, from_step=4)], world_size=6)
    with pytest.raises(UsageError, match="global_batch_size 128 from step 3 does not divide"):
        late.check_sizes(0)


def test_a_schedule_of_one_size_is_no_schedule(lock: Path) -> None:
    plain, same = scheduled(lock, 8, []), scheduled(lock, 8, [change(8, from_step=5)])
    assert plain.batch_sizes == same.batch_sizes == StepSizes.constant(8 * ROW)
    assert plain.phases() == same.phases()
    assert sum(stage.rows for stage in Lock.read(lock).stages) == ENDS[-1]
