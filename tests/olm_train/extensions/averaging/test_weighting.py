from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olm_data.errors import UsageError
from olm_train.extensions.averaging import weighting as averaging
from olm_train.extensions.averaging.weighting import (
    RunningMean,
    Weighting,
    fraction,
    shares,
    shares_of_factors,
)

WEIGHTINGS: tuple[Weighting, ...] = ("uniform", "linear", "decay")


def running(
    values: list[torch.Tensor], weighting: Weighting
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = RunningMean({"w": values[0]})
    for number, value in enumerate(values, start=1):
        mean.update({"w": value}, fraction(weighting, number))
    return mean.mean["w"], mean.tensors


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@given(count=st.integers(1, 60), seed=st.integers(0, 1000), drift=st.floats(0, 3))
@settings(max_examples=30)
def test_the_mean_is_that_of_float64_rounded_once(
    weighting: Weighting, count: int, seed: int, drift: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(40, generator=draw)
    values = [start + drift * torch.randn(40, generator=draw) for _ in range(count)]
    exact = np.stack([value.numpy().astype(np.float64) for value in values])
    wanted = np.tensordot(np.array(shares(weighting, count)), exact, axes=1)
    got, _ = running(values, weighting)
    # rounded once to fp32, and each of the updates in fp64 loses 2^-48 of what it adds up
    rounding = np.spacing(np.abs(wanted).astype(np.float32)) / 2
    updates = count * 2.0**-48 * np.abs(exact).max(0)
    assert (np.abs(got.numpy() - wanted) <= rounding + updates).all()


def test_thousands_of_steps_lose_nothing_where_plain_fp32_does() -> None:
    draw = torch.Generator().manual_seed(0)
    values = [1 + 1e-3 * torch.randn(500, generator=draw) for _ in range(3000)]
    exact = np.stack([value.numpy().astype(np.float64) for value in values]).mean(0)
    got, _ = running(values, "uniform")
    plain = torch.zeros(500)
    for number, value in enumerate(values, start=1):
        plain.lerp_(value, 1 / number)
    assert np.array_equal(got.numpy(), exact.astype(np.float32))
    assert not np.array_equal(plain.numpy(), exact.astype(np.float32))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("count", [1, 2, 7, 500])
def test_fractions_of_a_running_mean_come_to_the_shares(weighting: Weighting, count: int) -> None:
    got = [0.0] * count
    for number in range(count):
        part = fraction(weighting, number + 1)
        got = [share * (1 - part) for share in got]
        got[number] = part
    assert got == pytest.approx(shares(weighting, count), abs=1e-14)
    assert sum(shares(weighting, count)) == pytest.approx(1)


def test_shares_are_what_the_names_say() -> None:
    assert shares("uniform", 4) == [0.25] * 4
    assert shares("linear", 3) == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    root = math.sqrt
    assert shares("decay", 3) == pytest.approx(
        [root(1 / 3), root(2 / 3) - root(1 / 3), 1 - root(2 / 3)]
    )
    assert shares_of_factors([0.9, 0.4]) == pytest.approx([0.1, 0.5, 0.4])
    assert shares_of_factors([]) == [1.0]


@pytest.mark.parametrize("factors", [[0.5, 0.6], [1.1], [0.5, -0.1], [math.nan]])
def test_factors_that_are_no_decay_are_refused(factors: list[float]) -> None:
    with pytest.raises(UsageError, match="no decay"):
        shares_of_factors(factors)


def sgd(data: torch.Tensor, rates: list[float]) -> list[torch.Tensor]:
    """The weights before and after each step of torch's SGD, whose gradients are the data."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, data.shape[1], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    seen = [weight.detach().clone()]
    for row, rate in zip(data, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = (row * weight).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(weight.detach().clone())
    return seen


def test_a_merge_of_a_constant_run_is_the_decayed_run() -> None:
    """Exactly, where the gradients do not depend on the weights."""
    data = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factors = [1 - math.sqrt(number / 13) for number in range(1, 13)]
    constant = sgd(data, [0.1] * 12)
    decayed = sgd(data, [0.1 * factor for factor in factors])
    merged = sum(s * w for s, w in zip(shares("decay", 13), constant, strict=True))
    torch.testing.assert_close(merged, decayed[-1], rtol=1e-13, atol=1e-13)
    assert not torch.allclose(merged, constant[-1], rtol=1e-3)


def test_what_has_no_mean_is_left_out_and_precision_is_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(averaging, "_AT_ONCE", 3)  # several groups
    values = {"a": torch.ones(2, 2).bfloat16(), "b": torch.zeros(3), "n": torch.ones(2).long()}
    mean = RunningMean(values)
    mean.update(values, 1)
    mean.update({**values, "a": torch.full((2, 2), 2.0).bfloat16(), "b": torch.ones(3)}, 0.5)
    assert mean.tensors.keys() == {"mean.a", "mean.b", "carry.a", "carry.b"}
    assert mean.mean["a"].dtype == torch.float32
    assert mean.mean["a"].unique().tolist() == [1.5]
    assert mean.mean["b"].unique().tolist() == [0.5]
