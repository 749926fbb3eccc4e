"""Row 47: world size, micro-batch, accumulation and prefetch never change what is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import random_shards, write_mixture

from olm_data.order.steps import order_digest
from olm_train.data import DataLoader

S = 4


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = {"a": random_shards(0, [[7] * 60, [3] * 60]), "b": random_shards(1, [[50] * 12])}
    return write_mixture(
        tmp_path_factory.mktemp("mixture"),
        sources,
        stages=[(1600, {"a": 2, "b": 1}), (800, {"b": 3, "a": 1})],
        sequence_length=S,
    )


def run(lock: Path, state: dict, steps: int, world: int, micro: int, rows: int, prefetch: int):
    """Read `steps` steps on `world` ranks; return rows and tokens of each step, and the state."""
    loaders = [
        DataLoader(
            lock,
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
def test_every_step_holds_the_same_tokens_however_a_run_is_cut_and_resumed(
    lock: Path, data: st.DataObject
) -> None:
    wanted, _ = run(lock, {}, 12, world=1, micro=48, rows=48, prefetch=0)
    stream: list = []
    state: dict = {}
    while len(stream) < 12:
        steps = data.draw(st.integers(1, 12 - len(stream)), label="steps")
        part, state = run(lock, state, steps, **data.draw(sizes(), label="sizes"))
        stream += part
    for got, expected in zip(stream, wanted, strict=True):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("world", [1, 2, 3, 8, 16])
def test_any_world_size_reads_the_same_rows(lock: Path, world: int) -> None:
    stream, state = run(lock, {}, 2, world=world, micro=1, rows=2 * world, prefetch=1)
    assert [row for step in stream for row in step[0].tolist()] == list(range(4 * world))
    assert state["rows_consumed"] == 4 * world
