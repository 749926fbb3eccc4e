"""Bytes of each way to share a model: less where more ranks hold it."""

from __future__ import annotations

from typing import Any

from support.auto_runs import tied
from torch import nn

from olm_train.extensions.auto.size import KNOWN, UNIT, need_of_any, unit_size
from olm_train.extensions.auto.strategy import DeviceConfig
from olm_train.parallel.config import DataParallelConfig, DataParallelType
from olm_train.parallel.wrapping import units


def devices(ranks: int, nodes: int = 1) -> DeviceConfig:
    return DeviceConfig(memory=10**9, world_size=ranks, nodes=nodes)


def config(name: str = "fsdp", **options: Any) -> DataParallelConfig:
    return DataParallelConfig(name=DataParallelType(name), **options)


def test_of_any_model_weights_gradients_and_two_moments_are_counted() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].requires_grad_(False)
    inner = units(model, (nn.Linear,))

    def need(ranks: int, how: DataParallelConfig, micro: int = 1) -> float:
        return need_of_any(model, inner, devices(ranks), micro_batches=micro)(how) * KNOWN

    assert need(1, config("ddp")) == need(2, config("ddp")) == 800 + 400 + 800
    assert need(4, config(reshard_after_forward=False)) == 500 + 800
    assert need(4, config()) == 500 + 2 * 400
    assert need(4, config(), micro=2) == 400 + 400 + 2 * 400  # gradients whole
    assert need(4, config(cpu_offload=True)) == 100 + 2 * 400
    assert need(4, config("hsdp", num_replicas=2)) == 1000 + 2 * 400


def test_models_are_cut_into_some_dozens_of_units() -> None:
    assert unit_size(tied()) == sum(p.numel() for p in tied().parameters()) // 32
    assert unit_size(nn.Linear(1, 1)) == 1
    assert unit_size(nn.Linear(10**5, 10**5, device="meta")) == UNIT
