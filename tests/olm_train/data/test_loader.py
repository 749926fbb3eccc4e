"""The loader: whoever reads, the same rows; state, skipping, evaluation, refusals; its thread."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.own_data import Own
from support.small_datasets import mix_datasets, random_shards, write_dataset, write_mixture

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.mixture.revise import extend
from olm_data.order.steps import Steps, StepSizes
from olm_data.rows.reader import RowReader
from olm_train.data import Batch, DataLoader, EvalLoader
from olm_train.data.base import require_lock
from olm_train.data.loader import _rows_of_ranks
from olm_train.data.lock_words import describe_lock, drawn_before, lock_difference
from olm_train.data.prefetch import Prefetcher

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


def test_defaults_say_that_there_is_no_lock() -> None:
    loader = Own()
    assert loader.lock is None
    assert loader.rows_of_step(0).size == 0
    assert loader.order_digest(0) is None
    assert loader.skip == ()
    assert loader.tokens_before(3) == 24
    assert loader.ready(0.0)
    with pytest.raises(UsageError, match="rows can be left out of a mixture lock alone"):
        loader.leave_out([(0, 1)])
    with pytest.raises(UsageError, match="the callback x needs a mixture lock"):
        require_lock(loader, "the callback x")


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


def test_a_difference_is_told_line_by_line() -> None:
    old, new = {"seed": "1", "packing": "concat"}, {"seed": "2", "packing": "concat", "more": "3"}
    assert lock_difference(old, new) == (
        "seed: checkpoint has 1, this lock has 2; more: checkpoint has nothing, this lock has 3"
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "its run has drawn rows from code, prose; some may be trained on again"),
        ({"rows_consumed": 0}, None),
        ({"lock": {"seed": "1", "source code": "dataset of another text, 9 rows"}}, None),
        ({"lock": None}, None),
    ],
)
def test_data_that_another_run_has_drawn_from_are_named(
    tiny_mixture: Path, changed: dict[str, Any], says: str | None
) -> None:
    lock = Lock.read(tiny_mixture)
    state = {"lock": describe_lock(lock), "rows_consumed": 8, "lock_digest": "of another mixture"}
    assert drawn_before(state | changed, lock) == says
    assert drawn_before(state | changed, None) is None


def test_the_very_mixture_is_named_with_the_rows_trained_on(tiny_mixture: Path) -> None:
    lock = Lock.read(tiny_mixture)
    state = {"lock": describe_lock(lock), "rows_consumed": 8, "lock_digest": lock.digest}
    said = drawn_before(state, lock)
    assert said.startswith("its run has trained on the first 8 rows of this very mixture")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("olm-prefetch")}


@pytest.mark.parametrize("depth", [1, 2, 7, 100])
def test_items_come_once_and_in_order_at_any_depth(depth):
    with closing(Prefetcher(iter(range(50)), depth)) as items:
        assert list(items) == list(range(50))
        with pytest.raises(StopIteration):
            next(items)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_thread_never_runs_further_ahead_than_the_depth(depth):
    made = 0
    blocked = threading.Event()
    taken = 0

    def produce() -> Iterator[int]:
        nonlocal made
        for item in range(20):
            made += 1
            # one item may be in the producer's hands besides those that are ready
            assert made <= taken + depth + 1
            if made == depth + 1:
                blocked.set()
            yield item

    with closing(Prefetcher(produce(), depth)) as items:
        assert blocked.wait(600)  # reached its bound with nothing taken
        for wanted in range(20):
            taken = wanted + 1
            assert next(items) == wanted
        with pytest.raises(StopIteration):
            next(items)


def test_an_error_is_raised_by_the_next_that_needed_the_item_and_keeps_its_parts():
    error = ValidationError("a block changed", where="shard-00003", fix="restore it")

    def produce() -> Iterator[int]:
        yield 1
        yield 2
        raise error

    with closing(Prefetcher(produce(), 5)) as items:
        assert next(items) == 1
        assert next(items) == 2
        for _ in range(2):  # it does not turn into an end of data
            with pytest.raises(ValidationError) as caught:
                next(items)
            assert caught.value is error


def test_close_ends_a_thread_that_waits_for_room():
    before = threads()
    items = Prefetcher(iter(range(1000)), 2)
    assert next(items) == 0
    items.close()
    items.close()
    assert threads() <= before
    with pytest.raises(RuntimeError, match="closed"):
        next(items)


class Circle:
    """Keeps a prefetcher until the collector runs."""

    def __init__(self, items: Iterator[int]) -> None:
        self.held, self.me = Prefetcher(items, 1), self


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The garbage collector runs where a test says so."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
def test_a_prefetcher_may_be_collected_in_its_own_thread():
    begun, dropped = threading.Event(), threading.Event()

    def produce() -> Iterator[int]:
        begun.set()
        dropped.wait(600)
        gc.collect()
        yield 1

    before = threads()
    circle = Circle(produce())
    begun.wait(600)
    (thread,) = threads() - before
    del circle
    dropped.set()
    thread.join(600)
    assert not thread.is_alive()
    gc.collect()  # what a finalizer raised is an error of this test


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
def test_a_prefetcher_is_collected_while_its_thread_waits_for_the_same_thread():
    begun, lock, got = threading.Event(), threading.Lock(), list[bool]()

    def produce() -> Iterator[int]:
        begun.set()
        got.append(lock.acquire(timeout=10))
        yield 1

    before = threads()
    with lock:
        circle = Circle(produce())
        begun.wait(600)
        (thread,) = threads() - before
        del circle
        gc.collect()
    thread.join(600)
    assert got == [True]


@pytest.mark.slow
def test_an_interpreter_exits_while_the_thread_waits():
    program = (
        "from itertools import count; from olm_train.data.prefetch import Prefetcher;"
        "items = Prefetcher(count(), 3); print(next(items), next(items))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1\n", "")


def test_a_depth_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Prefetcher(iter([]), 0)
