"""Layers: norms and linear maps are torch's, in the dtype of their input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olm_train.model.layers import LinearLayer
from olm_train.model.norm import LayerNorm, RMSNorm

WIDTH = 12


def stir(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layers_compute_in_the_dtype_of_their_input_and_keep_their_weights(
    dtype: torch.dtype,
) -> None:
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    linear, norm = LinearLayer(WIDTH, 5, bias=True), RMSNorm(WIDTH, eps=1e-6)
    for module in (linear, norm):
        stir(module)
        out = module(x)
        assert out.dtype == dtype
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    expected = F.linear(x, linear.weight.to(dtype), linear.bias.to(dtype))
    assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_norms_are_those_of_torch(bias: bool) -> None:
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    rms, layer = RMSNorm(WIDTH, eps=1e-6), LayerNorm(WIDTH, eps=1e-6, bias=bias)
    stir(rms)
    stir(layer)
    torch.testing.assert_close(rms(x), F.rms_norm(x, (WIDTH,), rms.weight, 1e-6))
    expected = F.layer_norm(x, (WIDTH,), layer.weight, layer.bias, 1e-6)
    torch.testing.assert_close(layer(x), expected)


def test_a_linear_map_knows_the_rows_of_each_of_its_matrices() -> None:
    assert LinearLayer(WIDTH, 10).parts == (10,)
    assert LinearLayer(WIDTH, 10, parts=(4, 6)).parts == (4, 6)
