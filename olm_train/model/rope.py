"""Rotary positions (Su et al., 2021) and the ways to stretch them to longer documents.

    positions -> angles = position * frequency of each pair -> cos, sin -> rotate(q), rotate(k)

A scaling changes the frequencies (and with YaRN the length of cos and sin), nothing else. A larger
`theta` (ABF, Xiong et al., 2023) needs no scaling of its own: it is the base of the series.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from msgspec import Meta
from torch import Tensor

from olm_data.config.convert import Config
from olm_data.config.hints import PositiveInt
from olm_train.model.part import require
from olm_train.model.precision import at_least_fp32, wide

Longer = Annotated[float, Meta(ge=1)]
"""How many times longer the documents get; less than 1 would shorten them."""


@dataclass(frozen=True, kw_only=True)
class PositionInterpolation(Config):
    """All positions are divided by one factor (Chen et al., 2023; "linear" elsewhere).

    Attributes:
        name: pi.
        factor: how many times longer the documents get, at least 1.
    """

    name: Literal["pi"] = "pi"
    factor: Longer

    attention_factor = 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Divide every frequency by the factor."""
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Config):
    """Long waves are interpolated, short ones kept, those between blended (Llama 3.1; stepwise).

    Attributes:
        name: llama3.
        factor: how many times longer the documents get, at least 1.
        old_context_len: tokens of the longest documents trained on before.
        low_freq_factor: waves longer than old_context_len / this are interpolated.
        high_freq_factor: waves shorter than old_context_len / this are kept; more than the low one.
    """

    name: Literal["llama3"] = "llama3"
    factor: Longer
    old_context_len: PositiveInt
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    attention_factor = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            "low_freq_factor",
            "lies between 0 and high_freq_factor",
        )

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Divide by the factor with a weight that falls from 1 (long waves) to 0 (short waves)."""
        waves = self.old_context_len * frequencies / (2 * math.pi)  # in the old context
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class YaRNScaling(Config):
    """A blend like Llama 3's, linear in the pair's number, sharper attention (Peng et al., 2023).

    Attributes:
        name: yarn.
        factor: how many times longer the documents get, at least 1.
        old_context_len: tokens of the longest documents trained on before.
        beta_fast: pairs that turn more often than this in the old context are kept.
        beta_slow: pairs that turn less often than this are interpolated; less than beta_fast.
    """

    name: Literal["yarn"] = "yarn"
    factor: Longer
    old_context_len: PositiveInt
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        slow, fast = self.beta_slow, self.beta_fast
        require(0 < slow < fast, "beta_slow", "lies between 0 and beta_fast")

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by: the square root of the attention's temperature."""
        return 0.1 * math.log(self.factor) + 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Divide by the factor with a weight that rises from 0 to 1 with the pair's number."""
        pairs = frequencies.numel()
        first, last = self.ramp(2 * pairs, theta)
        number = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype)
        stretched = ((number - first) / max(last - first, 1e-3)).clamp(0, 1)
        return stretched * frequencies / self.factor + (1 - stretched) * frequencies

    def ramp(self, head_dim: int, theta: float) -> tuple[int, int]:
        """Return the last pair that is kept, and the first that is wholly interpolated."""
        first = max(math.floor(self._pair(self.beta_fast, head_dim, theta)), 0)
        return first, min(math.ceil(self._pair(self.beta_slow, head_dim, theta)), head_dim - 1)

    def _pair(self, turns: float, head_dim: int, theta: float) -> float:
        """Number of the pair that turns `turns` times in the old context."""
        waves = self.old_context_len / (2 * math.pi * turns)
        return head_dim * math.log(waves) / (2 * math.log(theta))


RopeScaling = PositionInterpolation | Llama3Scaling | YaRNScaling


class Rope(NamedTuple):
    """The rotary positions of a layer: base and scaling of its waves."""

    theta: float
    scaling: RopeScaling | None


def rope_table(
    positions: Tensor,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, in fp32, or in fp64 for a model in it.

    Args:
        positions: [b, S] integers, restarting at 0 at each document.
        head_dim: even size of a head.
        theta: base of the geometric series of wave lengths.
        scaling: changes the frequencies.
        dtype: that the model computes in.

    Returns:
        cos, sin: each fp32 or fp64 [b, S, 1, head_dim / 2], ready to multiply
        [b, S, heads, head_dim / 2].
    """
    dtype = wide(dtype)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype)
    frequencies = theta ** (-exponents / head_dim)
    if scaling is not None:
        frequencies = scaling.scale(frequencies, theta)
    angles = positions.to(dtype)[..., None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scaling is None or scaling.attention_factor == 1.0:
        return cos, sin
    return cos * scaling.attention_factor, sin * scaling.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim/2]) of [b, S, heads, head_dim]; in fp32 or fp64."""
    if x.is_cpu and not torch.compiler.is_compiling():
        return _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    first, second = at_least_fp32(x).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """`rotate` in half of the passes over memory; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(upstream[0], cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty(x.shape, dtype=cos.dtype)
    (a, b), (out_a, out_b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)
    return out.to(x.dtype)
