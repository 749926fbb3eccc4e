from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.probe_checks import sharded_statistics

from olm_train.distributed.world import World
from olm_train.extensions.monitors.gap_monitor import (
    SMALL,
    finish,
    lost_updates,
    measure,
    underflows_of,
)

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@pytest.mark.xdist_group("parallel")
@given(st.lists(SHAPES, min_size=8, max_size=40), st.integers(0, 1 << 30))
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_sharded_tensors_have_the_statistics_of_whole_ones(
    shapes: list[tuple[int, ...]], seed: int
) -> None:
    assert run_ranks(sharded_statistics, 2, shapes, seed) == [True, True]


def test_a_large_tensor_is_measured_as_a_small_one() -> None:
    tensor = torch.randn(SMALL + 7, generator=torch.Generator().manual_seed(1)) * 3 + 1
    tensor[:1000] = 0
    found = finish(measure([tensor], World()), World())
    exact = tensor.double()
    for value, wanted in (
        (found.max, exact.abs().max()),
        (found.mean, exact.mean()),
        (found.var, exact.var()),
        (found.rms, exact.square().mean().sqrt()),
        (found.zeros, torch.tensor(1000 / len(tensor), dtype=torch.float64)),
    ):
        torch.testing.assert_close(value[0], wanted, rtol=1e-6, atol=0)


def test_what_is_not_finite_shows() -> None:
    tensors = [torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])]
    found = finish(measure(tensors, World()), World())
    assert math.isnan(found.max[0])
    assert math.isnan(found.mean[0])
    assert found.max[1] == math.inf


def test_underflows_are_small_numbers_and_updates_without_effect() -> None:
    (small,) = underflows_of([torch.tensor([0.0, 1e-39, -1e-40, 1e-30])])
    assert small == 2
    before = torch.tensor([1.0, 1.0, 1.0])
    (lost,) = lost_updates([before], [before + torch.tensor([0.0, 1e-5, 0.5])])
    assert lost == 1
