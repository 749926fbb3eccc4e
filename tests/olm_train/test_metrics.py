"""Metrics are read exactly, in order, once."""

from __future__ import annotations

import torch

from olm_train.metrics import MetricsBuffer


def test_values_come_out_as_they_went_in_by_ascending_step_and_once() -> None:
    buffer = MetricsBuffer()
    third = torch.tensor(1 / 3)
    buffer.record(2, {"a": third, "b": 0.1})
    buffer.record(1, {"a": torch.tensor(2**53 - 1), "c": torch.tensor([1.5])})
    buffer.record(2, {"d": 7})
    assert buffer.collect() == [
        (1, {"a": float(2**53 - 1), "c": 1.5}),
        (2, {"a": third.item(), "b": 0.1, "d": 7.0}),
    ]
    assert buffer.collect() == []


def test_a_recorded_tensor_may_change_its_graph_but_not_its_value() -> None:
    weight = torch.ones((), requires_grad=True)
    buffer = MetricsBuffer()
    buffer.record(1, {"loss": weight * 2})
    ((_, metrics),) = buffer.collect()
    assert metrics == {"loss": 2.0}
