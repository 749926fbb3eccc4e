"""FAULTS rows 47 to 49, the loader: the same rows for any sizes, from any state, once an epoch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import random_shards, write_mixture

from olm_data.order.schedule import Schedule, ScheduleStage
from olm_data.order.steps import order_digest
from olm_train.data import DataLoader

S, ROWS = 4, 6


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = {"a": random_shards(0, [[7] * 60, [3] * 60]), "b": random_shards(1, [[50] * 12])}
    return write_mixture(
        tmp_path_factory.mktemp("mixture"),
        sources,
        stages=[(1600, {"a": 2, "b": 1}), (800, {"b": 3, "a": 1})],
        sequence_length=S,
    )


def run(
    two_stages: Path, state: dict, steps: int, world: int, micro: int, rows: int, prefetch: int
):
    """Read `steps` steps on `world` ranks; return rows and tokens of each step, and the state."""
    loaders = [
        DataLoader(
            two_stages,
            global_batch_size=rows * S,
            rank_microbatch_size=micro * S,
            rank=rank,
            world_size=world,
            prefetch=prefetch,
        )
        for rank in range(world)
    ]
    for loader in loaders:
        if state:
            loader.load_state_dict(state)
    first = loaders[0].step
    iterators = [iter(loader) for loader in loaders]
    stream = []
    for step in range(first, first + steps):
        batches = [batch for iterator in iterators for batch in next(iterator)]
        seen = np.concatenate([batch.rows.numpy() for batch in batches])
        assert order_digest(loaders[0].lock.digest, seen) == loaders[0].order_digest(step)
        stream.append(
            [
                np.concatenate([getattr(b, name).numpy() for b in batches])
                for name in ("rows", "input_ids", "labels", "positions")
            ]
        )
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    for loader in loaders:
        loader.close()
    return stream, states[0]


@st.composite
def sizes(draw: st.DrawFn, rows: int = 48):
    world = draw(st.sampled_from([w for w in range(1, 17) if rows % w == 0]))
    micro = draw(
        st.sampled_from([m for m in range(1, rows // world + 1) if rows // world % m == 0])
    )
    return {"world": world, "micro": micro, "prefetch": draw(st.integers(0, 3)), "rows": rows}


@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data())
def test_47_every_step_holds_the_same_tokens_however_a_run_is_cut_and_resumed(
    two_stages: Path, data: st.DataObject
) -> None:
    wanted, _ = run(two_stages, {}, 12, world=1, micro=48, rows=48, prefetch=0)
    stream: list = []
    state: dict = {}
    while len(stream) < 12:
        steps = data.draw(st.integers(1, 12 - len(stream)), label="steps")
        part, state = run(two_stages, state, steps, **data.draw(sizes(), label="sizes"))
        stream += part
    for got, expected in zip(stream, wanted, strict=True):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("world", [1, 2, 3, 8, 16])
def test_47_any_world_size_reads_the_same_rows(two_stages: Path, world: int) -> None:
    stream, state = run(two_stages, {}, 2, world=world, micro=1, rows=2 * world, prefetch=1)
    assert [row for step in stream for row in step[0].tolist()] == list(range(4 * world))
    assert state["rows_consumed"] == 4 * world


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = {"a": random_shards(0, [[7] * 30, [3] * 20]), "b": random_shards(1, [[50] * 4])}
    return write_mixture(
        tmp_path_factory.mktemp("mixture"),
        sources,
        stages=[(480, {"a": 2, "b": 1})],
        sequence_length=S,
    )


def open_loader(lock: Path, prefetch: int) -> DataLoader:
    return DataLoader(
        lock, global_batch_size=ROWS * S, rank_microbatch_size=2 * S, prefetch=prefetch
    )


@pytest.mark.parametrize("prefetch", [0, 1, 2, 50])
def test_48_the_state_after_every_step_leads_to_exactly_the_next_rows(
    lock: Path, prefetch: int
) -> None:
    whole = open_loader(lock, prefetch)
    states, rows = [whole.state_dict()], []
    for batches in whole:
        states.append(whole.state_dict())
        rows.append([batch.rows.tolist() for batch in batches])
    assert len(rows) == whole.steps == 20
    for step, state in enumerate(states):
        resumed = open_loader(lock, prefetch)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert [[batch.rows.tolist() for batch in batches] for batches in resumed] == rows[step:]
        assert resumed.state_dict() == states[-1]


@pytest.mark.slow
def test_48_a_process_killed_while_its_thread_reads_ahead_loses_and_repeats_nothing(
    lock: Path, tmp_path: Path
) -> None:
    state_file = tmp_path / "state.json"
    program = """
import json, os, sys
from olm_train.data import DataLoader
lock, state_file, rows, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
loader = DataLoader(lock, global_batch_size=rows * size, rank_microbatch_size=2 * size, prefetch=9)
if os.path.exists(state_file):
    loader.load_state_dict(json.load(open(state_file)))
for batches in loader:
    state = {"seen": [row for b in batches for row in b.rows.tolist()]} | loader.state_dict()
    with open(state_file + ".new", "w") as file:
        json.dump(state, file)
    os.replace(state_file + ".new", state_file)
    print(json.dumps(state["seen"]), flush=True)
    if loader.step == 7 and len(sys.argv) > 5:
        sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(lock), str(state_file), str(ROWS), str(S)]
    seen: list[int] = []
    with subprocess.Popen(
        [*command, "wait"], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for _ in range(7):
            seen += json.loads(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    assert json.loads(state_file.read_text())["rows_consumed"] == len(seen) == 7 * ROWS
    done = subprocess.run(command, capture_output=True, check=True)
    seen += [row for line in done.stdout.splitlines() for row in json.loads(line)]
    assert seen == list(range(120))


def assert_each_row_once_an_epoch(schedule: Schedule) -> None:
    place = schedule.locate(np.arange(schedule.total_rows))
    for source, size in enumerate(schedule.source_rows.tolist()):
        here = place.source == source
        epochs, rows = place.epoch[here], place.row[here]
        drawn = len(rows)
        assert np.array_equal(epochs, np.arange(drawn) // size)  # epochs follow each other
        seen = np.bincount(rows, minlength=size)
        assert len(seen) == size
        assert seen.min() >= drawn // size
        assert seen.max() <= -(-drawn // size)
        assert len(np.unique(epochs * size + rows)) == drawn  # never twice in an epoch


@pytest.mark.parametrize("seed", [0, 20260101, 2**63 - 1])
def test_49_every_row_once_an_epoch_for_all_small_sizes_at_once(seed: int) -> None:
    sources = [(f"source-{n}", n) for n in range(1, 129)]
    rounds = [ScheduleStage(3000, (1,) * 128), ScheduleStage(40_000, tuple(range(1, 129)))]
    assert_each_row_once_an_epoch(Schedule(seed, sources, rounds))


@given(
    sizes=st.lists(st.integers(1, 200), min_size=3, max_size=3),
    stages=st.lists(
        st.tuples(st.integers(0, 500), st.tuples(*[st.integers(0, 20)] * 3).filter(any)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**63 - 1),
)
def test_49_every_row_once_an_epoch_for_any_stages(
    sizes: list[int], stages: list[tuple[int, tuple[int, ...]]], seed: int
) -> None:
    sources = [(f"source-{i}", n) for i, n in enumerate(sizes)]
    assert_each_row_once_an_epoch(
        Schedule(seed, sources, [ScheduleStage(*stage) for stage in stages])
    )


def test_49_two_ranks_of_any_batch_size_cover_the_run_without_overlap() -> None:
    schedule = Schedule(5, [("a", 100), ("b", 37)], [ScheduleStage(480, (2, 1))])
    whole = schedule.locate(np.arange(480))
    for world, batch in ((1, 16), (2, 8), (3, 24), (4, 48), (16, 32)):
        seen = []
        for start in range(0, 480, batch):
            rows = np.arange(start, min(start + batch, 480))
            for part in np.array_split(rows, world):
                place = schedule.locate(part)
                seen += list(
                    zip(
                        place.source.tolist(), place.epoch.tolist(), place.row.tolist(), strict=True
                    )
                )
        expected = zip(whole.source.tolist(), whole.epoch.tolist(), whole.row.tolist(), strict=True)
        assert seen == list(expected)


EPOCHS = 12


def numbered(rows: int, first: int) -> list[list[np.ndarray]]:
    """A source whose row r starts with token first + r; its documents have 3 tokens."""
    tokens = np.zeros(rows * S + 1, np.uint32)
    tokens[: rows * S : S] = first + np.arange(rows)
    documents = np.split(tokens, range(3, len(tokens), 3))
    half = len(documents) // 2
    return [documents[:half], documents[half:]]


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_49_every_epoch_reads_every_row_once(tmp_path: Path, rows: int) -> None:
    lock = write_mixture(
        tmp_path,
        {"a": numbered(rows, 1)},
        stages=[(EPOCHS * rows * S, {"a": 1})],
        sequence_length=S,
    )
    for world, micro in ((1, 1), (2, 3), (4, 1)):
        first_tokens = np.concatenate(read_all(lock, world, micro, global_rows=12))
        assert len(first_tokens) == EPOCHS * rows
        for epoch in range(EPOCHS):
            seen = np.sort(first_tokens[epoch * rows : (epoch + 1) * rows])
            np.testing.assert_array_equal(seen, 1 + np.arange(rows))


def read_all(lock: Path, world: int, micro: int, global_rows: int) -> list[np.ndarray]:
    """First tokens of all rows in global order, as `world` ranks hand them out."""
    ranks = [
        DataLoader(
            lock,
            global_batch_size=global_rows * S,
            rank_microbatch_size=micro * S,
            rank=rank,
            world_size=world,
        )
        for rank in range(world)
    ]
    return [
        batch.input_ids[:, 0].numpy()
        for steps in zip(*ranks, strict=True)
        for batches in steps
        for batch in batches
    ]
