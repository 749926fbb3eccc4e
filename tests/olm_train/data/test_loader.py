"""The loader: whoever reads, the same rows; state, skipping, evaluation, refusals."""

from __future__ import annotations

import gc
import json
import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_datasets import mix_datasets, random_shards, write_dataset, write_mixture

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.revise import extend
from olm_data.rows.reader import RowReader
from olm_train.data import Batch, DataLoader, EvalLoader

S = 8
STAGES = [(960, {"web": 3, "code": 1}), (328, {"web": 1, "code": 1})]


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 30, size=(3, 12)).tolist() for _ in range(2)]
    sources = {name: random_shards(i, lengths[i]) for i, name in enumerate(("web", "code"))}
    return write_mixture(
        tmp_path_factory.mktemp("mixture"), sources, stages=STAGES, sequence_length=S
    )


def loader(lock: Path, rows: int = 12, micro: int = 2, **options) -> DataLoader:
    return DataLoader(lock, global_batch_size=rows * S, rank_microbatch_size=micro * S, **options)


def rows_of(batches: list[Batch]) -> list[int]:
    return [row for batch in batches for row in batch.rows.tolist()]


def test_batches_hold_the_rows_of_the_lock_as_the_reader_gives_them(lock: Path) -> None:
    reader = RowReader(lock)
    with loader(lock) as batches:
        for step, micro_batches in enumerate(batches):
            assert len(micro_batches) == 6
            for m, batch in enumerate(micro_batches):
                rows = np.arange(2) + 2 * m + 12 * step
                wanted = reader.read(rows)
                for name in ("rows", "input_ids", "labels", "doc_start", "positions", "cu_seqlens"):
                    got = getattr(batch, name).numpy()
                    np.testing.assert_array_equal(got, getattr(wanted, name))
                assert batch.max_seqlen == S
        assert step + 1 == batches.steps == reader.total_rows // 12


def test_shapes_never_change_within_a_run(lock: Path) -> None:
    with loader(lock) as batches:
        shapes = {
            tuple(
                (t.dtype, tuple(t.shape))
                for t in (b.input_ids, b.labels, b.positions, b.cu_seqlens)
            )
            for step in batches
            for b in step
        }
    assert len(shapes) == 1


def test_rows_that_fill_no_step_are_counted_and_reported(
    lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = loader(lock, rows=16)
    assert (batches.steps, batches.leftover_rows) == (161 // 16, 1)
    with caplog.at_level(logging.WARNING):
        assert sum(len(rows_of(step)) for step in batches) == 160
    assert caplog.messages == [
        "the schedule ended after 10 steps; 1 rows at the end fill no step and are not trained on"
    ]


def test_the_digest_of_a_step_is_that_of_its_global_rows(lock: Path) -> None:
    ranks = [loader(lock, rank=r, world_size=3) for r in range(3)]
    assert len({rank.order_digest(2) for rank in ranks}) == 1
    assert len({ranks[0].order_digest(t) for t in range(ranks[0].steps)}) == ranks[0].steps
    assert ranks[0].rows_of_step(2).tolist() == list(range(24, 36))


def test_a_loader_nobody_holds_ends_its_thread(lock: Path) -> None:
    before = set(threading.enumerate())
    batches = loader(lock, prefetch=1)
    next(iter(batches))
    (thread,) = set(threading.enumerate()) - before
    del batches
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_the_state_is_plain_json(lock: Path) -> None:
    state = loader(lock, skip=[[3, 5]]).state_dict()
    assert json.loads(json.dumps(state)) == state
    assert state["rows_consumed"] == 0
    assert state["skip"] == [[3, 5]]


def test_skipped_rows_are_left_out_the_same_way_for_any_world_size(lock: Path) -> None:
    skip = [[4, 9], [30, 31], [40, 60]]
    wanted = [r for r in range(161) if not any(a <= r < b for a, b in skip)]
    for world in (1, 2, 3):
        steps = [list(loader(lock, skip=skip, rank=r, world_size=world)) for r in range(world)]
        seen = [
            row for ranks in zip(*steps, strict=True) for part in ranks for row in rows_of(part)
        ]
        assert seen == wanted[: len(seen)]
        assert len(wanted) - len(seen) < 12


def test_rows_can_be_skipped_when_a_run_is_resumed(lock: Path) -> None:
    first = loader(lock, skip=[[2, 4]])
    iterator = iter(first)
    seen = [rows_of(next(iterator)) for _ in range(2)]
    state = first.state_dict()
    assert state["rows_consumed"] == 26  # 24 trained, 2 skipped
    resumed = loader(lock, skip=[[50, 70]])  # the past is in the state, the future is new
    resumed.load_state_dict(state)
    seen += [rows_of(step) for step in resumed]
    rows = [row for step in seen for row in step]
    assert rows == [r for r in range(161) if r not in (2, 3) and not 50 <= r < 70][: len(rows)]
    assert resumed.state_dict()["skip"] == [[2, 4], [50, 70]]
    with pytest.raises(UsageError, match=r"rows \[5, 7\) were already trained on"):
        loader(lock, skip=[[5, 7]]).load_state_dict(state)


def test_the_state_of_another_lock_is_refused_and_the_difference_named(
    lock: Path, tmp_path: Path
) -> None:
    for name in ("web", "code"):
        (tmp_path / name).symlink_to(lock.parent / name)
    other = mix_datasets(tmp_path, ["web", "code"], stages=STAGES, sequence_length=S, seed=7)
    with pytest.raises(ValidationError, match="another mixture") as caught:
        loader(other).load_state_dict(loader(lock).state_dict())
    assert caught.value.where == "seed: checkpoint has 20260101, this lock has 7"


def test_a_position_that_is_no_whole_number_of_steps_is_refused(lock: Path) -> None:
    batches = loader(lock, rows=12)
    next(iter(batches))
    state = batches.state_dict()
    loader(lock, rows=6).load_state_dict(state)
    with pytest.raises(UsageError, match="has consumed 12 rows, not a whole number of steps"):
        loader(lock, rows=8).load_state_dict(state)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"global_batch_size": 12 * S + 1}, "set global_batch_size to 96 or 104"),
        ({"rank_microbatch_size": S - 1}, "set rank_microbatch_size to 8"),
        ({"world_size": 5}, "set global_batch_size to 80 or 160, or change rank_microbatch_size"),
        ({"world_size": 7}, "set global_batch_size to 112, or change"),
        ({"rank": 2, "world_size": 2}, "rank 2 does not exist among 2 ranks"),
        ({"prefetch": -1}, "prefetch is at least 0, not -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(
    lock: Path, sizes: dict[str, int], message: str
) -> None:
    options = {"global_batch_size": 12 * S, "rank_microbatch_size": 2 * S} | sizes
    with pytest.raises(UsageError) as caught:
        iter(DataLoader(lock, **options))
    assert message in str(caught.value)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_time_callers_wait_is_counted(lock: Path, prefetch: int) -> None:
    with loader(lock, prefetch=prefetch) as batches:
        assert batches.data_wait_seconds == 0.0
        iterator = iter(batches)
        next(iterator)
        waited = batches.data_wait_seconds
        assert waited > 0.0
    assert batches.data_wait_seconds == waited  # closing loses nothing
    next(iter(batches))
    assert batches.data_wait_seconds > waited  # nor does a second pass
    batches.close()


def test_batches_move_to_a_device_whole(lock: Path) -> None:
    with loader(lock, device="meta") as batches:
        batch = next(iter(batches))[0]
    assert {t.device.type for t in (batch.input_ids, batch.cu_seqlens, batch.rows)} == {"meta"}
    assert batch.to(torch.device("meta")).max_seqlen == S


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 3])
def test_evaluation_counts_every_token_once_over_all_ranks(
    tmp_path: Path, world: int, micro: int
) -> None:
    write_dataset(tmp_path / "d", random_shards(0, [[5, 3, 9, 24, 1], [1, 1, 40, 8], [2, 30, 1]]))
    dataset = Dataset.open(str(tmp_path / "d"))
    ranks = [
        list(EvalLoader(tmp_path / "d", S, micro * S, rank=r, world_size=world))
        for r in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    rows = [row for batch in batches for row in batch.rows.tolist() if row >= 0]
    assert rows == list(range(-(-(dataset.tokens - 1) // S)))
    labels = torch.cat([batch.labels.flatten() for batch in batches])
    starts = {dataset.document_span(n)[0] for n in range(dataset.documents)}
    wanted = [t for p, t in enumerate(dataset.read(0, dataset.tokens).tolist()) if p not in starts]
    assert labels[labels >= 0].tolist() == wanted


def test_an_evaluation_loader_can_be_iterated_again_and_closed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", random_shards(0, [[100]]))
    batches = EvalLoader(tmp_path / "d", S, S)
    assert len(batches) == len(list(batches)) == len(list(batches)) == 13
    next(iter(batches))
    batches.close()
    batches.close()


def test_a_checkpoint_of_a_lock_goes_on_with_the_lock_that_extends_it(lock: Path) -> None:
    old = loader(lock)
    for _step in old:
        pass
    state = old.state_dict()
    longer = extend(str(lock), 50 * S, str(lock.parent / "longer.lock.json"))
    resumed = loader(Path(longer.path))
    resumed.load_state_dict(state)
    whole = loader(Path(longer.path))
    steps = [rows_of(step) for step in whole]
    assert [rows_of(step) for step in resumed] == steps[old.steps :] != []
    with pytest.raises(ValidationError, match="another mixture"):  # never back to the shorter
        loader(lock).load_state_dict(resumed.state_dict())
