"""Metrics are read exactly, in order, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.runs import group_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from olm_data.errors import UsageError
from olm_train.metrics import MetricsBuffer, Reduce


def test_values_come_out_as_they_went_in_by_ascending_step_and_once() -> None:
    buffer = MetricsBuffer()
    third = torch.tensor(1 / 3)
    buffer.record(2, {"a": third, "b": 0.1})
    buffer.record(1, {"a": torch.tensor(2**53 - 1), "c": torch.tensor([1.5])})
    buffer.record(2, {"d": 7})
    assert buffer.collect(10**9) == [
        (1, {"a": float(2**53 - 1), "c": 1.5}),
        (2, {"a": third.item(), "b": 0.1, "d": 7.0}),
    ]
    assert buffer.collect(10**9) == []


def test_a_recorded_tensor_may_change_its_graph_but_not_its_value() -> None:
    weight = torch.ones((), requires_grad=True)
    buffer = MetricsBuffer()
    buffer.record(1, {"loss": weight * 2})
    ((_, metrics),) = buffer.collect(10**9)
    assert metrics == {"loss": 2.0}


@pytest.mark.parametrize(
    ("name", "value", "reduce"),
    [
        ("x", "text", None),
        ("x", None, None),
        ("x", torch.ones(3), None),
        ("x", torch.tensor(1j), None),
        ("x", 10**400, None),
        ("x", 1.0, "median"),
        ("", 1.0, None),
        ("two\nlines", 1.0, None),
        (3, 1.0, None),
    ],
)
def test_what_is_no_metric_is_refused_where_it_is_recorded(
    name: Any, value: Any, reduce: Any
) -> None:
    with pytest.raises(UsageError):
        MetricsBuffer().record_one(1, name, value, reduce)


def test_a_reduction_may_be_given_by_name() -> None:
    buffer = MetricsBuffer()
    buffer.record_one(1, "x", 2, "mean")  # type: ignore[arg-type]
    assert buffer.collect(1) == [(1, {"x": 2.0})]


def recorded() -> tuple[Any, str]:
    world = group_world()
    sharded = distribute_tensor(
        torch.arange(1.0, 7.0), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
    )
    buffer = MetricsBuffer(world)
    buffer.record_one(1, "norm", sharded.norm(), None)
    buffer.record_one(1, "largest", sharded.max(), Reduce.max)
    buffer.record_one(1, "mean", sharded.mean(), Reduce.sum)
    buffer.record_one(1, "plain", world.rank, Reduce.sum)
    collected = buffer.collect(1)
    if world.main:
        buffer.record_one(2, "norm", sharded.norm(), None)
    try:
        return collected, str(buffer.collect(2))
    except UsageError as error:
        return collected, error.what


def test_a_sharded_value_is_that_of_all_shards_and_of_one_rank_alone_is_refused() -> None:
    norm = float(torch.arange(1.0, 7.0).norm())
    for ((_, metrics),), refused in run_ranks(recorded, 2):
        assert metrics["norm"] == pytest.approx(norm, rel=1e-6)
        assert (metrics["largest"], metrics["mean"], metrics["plain"]) == (6.0, 7.0, 1.0)
        assert "'norm' of step 2 is sharded, and was not recorded on every rank" in refused
