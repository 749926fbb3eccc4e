"""What every order promises, whichever there are."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.order.base import Order, SourceEpochs, SourceSize
from olm_data.order.orders import ORDERS, manifest_orders
from olm_data.order.schedule import Schedule, ScheduleStage


def draw_order(data: st.DataObject, name: str, rows: list[int]) -> Order:
    """An order as a manifest asks for it, compiled for sources of so many rows."""
    keys: dict[str, int] = {}
    if name == "windowed":
        keys = {
            "window_chunks": data.draw(st.integers(1, 5)),
            "chunk_tokens": data.draw(st.integers(1, 200)),
        }
    elif name == "olmo-core":
        keys = {"batch_rows": data.draw(st.integers(1, rows[0]))}
    sources = [SourceSize(rows=n, tokens=8 * n + 1, shards=2) for n in rows]
    order = manifest_orders()[name](**keys).compile(sources)
    if name == "arriving":  # all of it is there
        order = msgspec.structs.replace(order, ended=(True,) * len(rows))
    return order


@pytest.mark.parametrize("name", ORDERS)
@given(data=st.data())
def test_the_positions_of_an_epoch_are_different_rows_and_the_inverse_is_exact(
    name: str, data: st.DataObject
) -> None:
    sizes = st.lists(st.integers(1, 300), min_size=1, max_size=1 if name == "olmo-core" else 3)
    rows, seed = data.draw(sizes), data.draw(st.integers(0, 2**63 - 1))
    order = draw_order(data, name, rows)
    assert order.fits(rows)
    turns = order.epoch_rows(np.array(rows))
    names = tuple(f"s{i}" for i in range(len(rows)))
    for source, n in enumerate(rows):
        epoch = data.draw(st.integers(0, 5))
        every = np.arange(n)
        epochs = SourceEpochs(
            seed, names, np.full(n, source), np.full(n, n), np.full(n, epoch, np.int64)
        )
        assert sorted(order.rows_at(every, epochs)) == list(range(n))
        assert (order.positions_of(order.rows_at(every, epochs), epochs) == every).all()
        assert 0 < turns[source] <= n
        # the order of one source does not depend on the others
        alone = SourceEpochs(
            seed, (names[source],), np.zeros(n, np.int64), every * 0 + n, every * 0
        )
        first = SourceEpochs(seed, names, np.full(n, source), every * 0 + n, every * 0)
        assert (order.for_source(source).rows_at(every, alone) == order.rows_at(every, first)).all()


@pytest.mark.parametrize("name", ORDERS)
@given(data=st.data())
def test_a_schedule_finds_each_row_where_it_put_it(name: str, data: st.DataObject) -> None:
    sizes = st.lists(st.integers(1, 50), min_size=1, max_size=1 if name == "olmo-core" else 3)
    rows, seed = data.draw(sizes), data.draw(st.integers(0, 2**63 - 1))
    order = draw_order(data, name, rows)
    counts = tuple(data.draw(st.integers(1, 3)) for _ in rows)
    sources = [(f"s{i}", n) for i, n in enumerate(rows)]
    schedule = Schedule(
        seed, sources, [ScheduleStage(data.draw(st.integers(1, 200)), counts)], order
    )
    found = schedule.locate(np.arange(schedule.total_rows))
    source = data.draw(st.integers(0, len(rows) - 1))
    row = data.draw(st.integers(0, rows[source] - 1))
    wanted = np.flatnonzero((found.source == source) & (found.row == row))
    assert schedule.rows_of(source, row).tolist() == wanted.tolist()
    mine = found.source == source
    pairs = list(zip(found.epoch[mine].tolist(), found.row[mine].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "a row twice in an epoch"
