"""Stages with a shorter sequence length: other shapes, and not one token more or less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import mix_datasets, random_shards, write_mixture

from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.order.steps import Phase
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
