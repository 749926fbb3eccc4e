"""Rotary scalings: read from a configuration, refused where they make no sense, right at the ends.

That each gives the angles of its formula is in test_decoder.py (against support/plain_decoder.py).
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from olm_data.config.convert import as_dict, parse
from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.rope import (
    Llama3Scaling,
    PositionInterpolation,
    RopeScaling,
    YaRNScaling,
    rope_table,
    rotate,
)

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
