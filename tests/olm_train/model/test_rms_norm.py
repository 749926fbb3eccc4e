"""The norm on a CPU: within a rounding of what fp64 gives, gradients too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from olm_train.model.norm import RMSNorm, rms_norm_on_cpu

EPS = 1e-6


def by_definition(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@given(
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.lists(st.integers(1, 5), max_size=3),
    st.integers(1, 300),
    st.integers(-6, 6),
    st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_the_definition(
    dtype: torch.dtype, rows: list[int], size: int, magnitude: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, upstream = (torch.randn(*rows, size, generator=generator) for _ in range(2))
    x = (x * 2.0**magnitude).to(dtype).requires_grad_()
    weight = (1 + torch.randn(size, generator=generator) / 4).to(dtype).requires_grad_()
    upstream = upstream.to(dtype)
    out = rms_norm_on_cpu(x, weight, EPS)
    found = (out, *torch.autograd.grad(out, (x, weight), upstream))
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    wanted = by_definition(*exact)
    all_wanted = (wanted, *torch.autograd.grad(wanted, exact, upstream.double()))
    by_rms = 1 / (exact[0].square().mean(-1, keepdim=True) + EPS).sqrt()
    # a sum is as exact as its largest term
    terms = (wanted, upstream * exact[1] * by_rms, size * upstream * exact[0] * by_rms)
    for one, other, term in zip(found, all_wanted, terms, strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        # in fp32 each of some eight operations rounds, in 16 bits the last one
        eps = torch.finfo(dtype).eps * (8 if dtype is torch.float32 else 1)
        atol = eps * term.abs().max().item() + torch.finfo(dtype).tiny
        torch.testing.assert_close(one.double(), other, rtol=eps, atol=atol)


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_layer_takes_it_on_a_cpu(
    zero_centred: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def recorded(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        calls.append(weight)
        return rms_norm_on_cpu(x, weight, eps)

    monkeypatch.setattr("olm_train.model.norm.rms_norm_on_cpu", recorded)
    norm = RMSNorm(8, EPS, zero_centred=zero_centred)
    torch.nn.init.constant_(norm.weight, 0.5)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    out, weight = norm(x.to(dtype)), 1.5 if zero_centred else 0.5
    assert [each.tolist() for each in calls] == [[weight] * 8]
    expected = F.rms_norm(x, (8,), torch.full((8,), weight), EPS)
    near = 2e-2 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.float(), expected, rtol=near, atol=near)


def test_a_row_of_zeros_stays_one() -> None:
    x = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    out = rms_norm_on_cpu(x, torch.ones(4, dtype=torch.bfloat16), EPS)
    out.sum().backward()
    assert not out.any()
    assert x.grad.isfinite().all()


def test_rows_need_not_lie_side_by_side() -> None:
    """Heads of queries are a part of one product."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 3, 5, 8, generator=generator).bfloat16()
    weight = torch.ones(8, dtype=torch.bfloat16)
    found = []
    for x in (whole[:, :, :2], whole[:, :, :2].contiguous()):
        leaf = x.detach().requires_grad_()
        out = rms_norm_on_cpu(leaf, weight, EPS)
        out.backward(whole[:, :, 3:])
        found.append((out, leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
