"""Layers: linear maps, norms, rotary positions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from olm_data.config.convert import as_dict, parse
from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.layers import LinearLayer
from olm_train.model.norm import LayerNorm, RMSNorm, rms_norm_on_cpu
from olm_train.model.rope import (
    Llama3Scaling,
    PositionInterpolation,
    RopeScaling,
    YaRNScaling,
    rope_table,
    rotate,
)

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
def test_layer_norms_are_those_of_torch(bias: bool) -> None:
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    layer = LayerNorm(WIDTH, eps=1e-6, bias=bias)
    stir(layer)
    expected = F.layer_norm(x, (WIDTH,), layer.weight, layer.bias, 1e-6)
    torch.testing.assert_close(layer(x), expected)


def test_a_linear_map_knows_the_rows_of_each_of_its_matrices() -> None:
    assert LinearLayer(WIDTH, 10).parts == (10,)
    assert LinearLayer(WIDTH, 10, parts=(4, 6)).parts == (4, 6)


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


SHAPE = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4}
ALL: list[RopeScaling] = [
    PositionInterpolation(factor=8.0),
    Llama3Scaling(factor=8.0, old_context_len=8192),
    YaRNScaling(factor=8.0, old_context_len=8192),
]


@pytest.mark.parametrize("scaling", ALL, ids=lambda scaling: scaling.name)
def test_a_scaling_is_read_by_its_name_and_written_back(scaling: RopeScaling) -> None:
    values = Values({"positions": {"scaling": as_dict(scaling)}, **SHAPE})
    config = parse(DecoderConfig, values)
    assert config.positions.scaling == scaling
    assert parse(DecoderConfig, Values(as_dict(config))) == config


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"name": "yarm", "factor": 2}, "yarn"),
        ({"name": "pi"}, "factor"),
        ({"name": "pi", "factor": 0.5}, "factor"),
        ({"name": "pi", "factor": 2, "old_context_len": 64}, "old_context_len"),
        ({"name": "yarn", "factor": 2}, "old_context_len"),
        ({"name": "yarn", "factor": 2, "old_context_len": 0}, "old_context_len"),
        ({"name": "yarn", "factor": 2, "old_context_len": 64, "beta_slow": 40}, "beta_slow"),
        ({"name": "llama3", "factor": 2, "old_context_len": 64, "high_freq_factor": 1}, "low_freq"),
    ],
    ids=str,
)
def test_a_scaling_that_makes_no_sense_is_refused(given_: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(DecoderConfig, Values({"positions": {"scaling": given_}, **SHAPE}))
    assert words in str(refusal.value)


@pytest.mark.parametrize("kind", [Llama3Scaling, YaRNScaling])
@given(
    factor=st.floats(1, 64),
    old=st.integers(512, 65_536),
    theta=st.floats(5_000, 5_000_000),
    half=st.integers(16, 128),
)
def test_short_waves_are_kept_long_ones_stretched_and_order_is_kept(
    kind: type[Llama3Scaling] | type[YaRNScaling], factor: float, old: int, theta: float, half: int
) -> None:
    plain = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    scaled = kind(factor=factor, old_context_len=old).scale(plain, theta)
    kept = scaled / plain
    assert kept[0] == 1
    assert (kept.diff() <= 1e-6).all()
    assert (kept >= 1 / factor - 1e-6).all()
    if 2 * math.pi / plain[-1] > 2 * old:  # YaRN ends a pair after the wave of the old context
        assert kept[-1] == pytest.approx(1 / factor, rel=1e-4)


def test_position_interpolation_gives_each_place_the_angles_of_a_smaller_one() -> None:
    positions = torch.arange(32)[None]
    scaled = rope_table(positions * 4, 16, 10_000.0, PositionInterpolation(factor=4.0))
    for one, other in zip(scaled, rope_table(positions, 16, 10_000.0), strict=True):
        torch.testing.assert_close(one, other)


def test_yarn_lengthens_queries_and_keys_by_its_formula() -> None:
    cos, sin = rope_table(
        torch.arange(8)[None], 16, 10_000.0, YaRNScaling(factor=16.0, old_context_len=64)
    )
    torch.testing.assert_close(
        (cos**2 + sin**2).sqrt(), torch.full_like(cos, 0.1 * math.log(16) + 1)
    )


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        PositionInterpolation(factor=4.0),
        Llama3Scaling(factor=8.0, old_context_len=64),
        YaRNScaling(factor=8.0, old_context_len=64),
    ],
    ids=lambda scaling: getattr(scaling, "name", "none"),
)
def test_angles_are_those_of_the_model_s_dtype(scaling: YaRNScaling | None) -> None:
    positions = torch.arange(4000)[None]
    for dtype, error in ((torch.float64, 1e-12), (torch.bfloat16, 1e-3)):
        cos, sin = rope_table(positions, 16, 10_000.0, scaling, dtype)
        assert cos.dtype == sin.dtype == torch.promote_types(dtype, torch.float32)
        size = scaling.attention_factor if scaling else 1.0
        ones = (cos.double() ** 2 + sin.double() ** 2) / size**2
        assert float((ones - 1).abs().max()) < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_and_its_gradient_are_the_products_with_a_complex_number(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(2, 9, 3, 8, generator=generator).to(dtype) for _ in range(2))
    cos, sin = rope_table(torch.arange(9).expand(2, -1), 8, 10_000.0)
    x.requires_grad_()
    rotated = rotate(x, cos, sin)
    rotated.backward(grad)
    turn = torch.complex(cos.double(), sin.double())
    for found, given_, by in ((rotated, x, turn), (x.grad, grad, turn.conj())):
        first, second = given_.detach().double().chunk(2, -1)
        expected = torch.complex(first, second) * by
        rounding = 0.0 if dtype is torch.float32 else 2.0**-8
        both = torch.cat((expected.real, expected.imag), -1)
        torch.testing.assert_close(found.double(), both, rtol=rounding, atol=1e-6)


def test_a_rotation_has_the_gradient_of_what_it_computes() -> None:
    cos, sin = rope_table(torch.arange(5)[None], 4, 100.0, dtype=torch.float64)
    x = torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: rotate(each, cos, sin), (x,))
