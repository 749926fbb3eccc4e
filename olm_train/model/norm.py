"""Norms: configuration and module of each kind.

All norms of a model are of one kind: those of the blocks, of queries and keys, and the last one.

On a CPU torch has no kernel for the root mean square norm and computes it as about ten operations
forward and twenty backward, each a pass over memory, and keeps the normalised input. This one has
five and eight and keeps a factor for each row; in 16 bits it takes half of the time, and sums the
weight's gradient in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olm_data.config.convert import Config
from olm_data.config.hints import PositiveFloat
from olm_train.model.precision import at_least_fp32


def rms_norm_on_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return what `F.rms_norm` does, rounded once, at the end; never a second derivative.

    Args:
        x: [..., size], any float dtype.
        weight: [size], likewise.
        eps: added to the mean of squares.
    """
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        factor = mean.add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, factor)
        return (wide * factor).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor = ctx.saved_tensors
        wide_weight, size = at_least_fp32(weight), x.shape[-1]
        grad, normed = at_least_fp32(upstream[0]), at_least_fp32(x) * factor
        by_weight = (grad * normed).reshape(-1, size)
        # d/dx = factor (grad weight - normed mean(grad weight normed))
        mean = torch.mv(by_weight, wide_weight).div_(-size).view_as(factor)
        x_grad = (grad * wide_weight).addcmul_(normed, mean).mul_(factor)
        return x_grad.to(x.dtype), by_weight.sum(0).to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019).

    The mean of squares is taken in fp32 whatever the input's dtype.

    Args:
        size: of the last dimension.
        eps: added to the mean of squares.
        zero_centred: multiply by 1 + weight.
    """

    def __init__(
        self, size: int, eps: float, *, zero_centred: bool = False, **factory: Any
    ) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, zero_centred
        self.weight = nn.Parameter(torch.empty(size, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; same shape and dtype."""
        weight = 1 + at_least_fp32(self.weight) if self.zero_centred else self.weight
        weight = weight.to(x.dtype)
        if x.is_cpu and not torch.compiler.is_compiling():
            return rms_norm_on_cpu(x, weight, self.eps)
        return F.rms_norm(x, self.weight.shape, weight, self.eps)


class LayerNorm(nn.Module):
    """Normalisation to mean 0 and variance 1 over the last dimension (Ba et al., 2016).

    Mean and variance are taken in fp32 whatever the input's dtype.
    """

    def __init__(self, size: int, eps: float, *, bias: bool, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, **factory))
        self.bias = nn.Parameter(torch.empty(size, **factory)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; same shape and dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps)


@dataclass(frozen=True, kw_only=True)
class NormPart(Config, ABC):
    """Base of every kind of norm."""

    @property
    def initial_weight(self) -> float:
        """What vectors but biases begin at."""
        return 1.0

    @abstractmethod
    def build(self, size: int, **factory: Any) -> nn.Module:
        """Return a norm over a last dimension of `size`: same shape and dtype out."""


@dataclass(frozen=True, kw_only=True)
class RMSNormConfig(NormPart):
    """Root mean square norms.

    Attributes:
        name: rms_norm.
        eps: added to the mean square, or variance.
        zero_centred: multiply by 1 + weight, and weights start at 0 (Gemma).
    """

    name: Literal["rms_norm"] = "rms_norm"
    eps: PositiveFloat = 1e-6
    zero_centred: bool = False

    @property
    def initial_weight(self) -> float:
        return 0.0 if self.zero_centred else 1.0

    def build(self, size: int, **factory: Any) -> RMSNorm:
        return RMSNorm(size, self.eps, zero_centred=self.zero_centred, **factory)


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(NormPart):
    """Layer norms.

    Attributes:
        name: layer_norm.
        eps: added to the mean square, or variance.
        bias: they have a bias.
    """

    name: Literal["layer_norm"] = "layer_norm"
    eps: PositiveFloat = 1e-6
    bias: bool = False

    def build(self, size: int, **factory: Any) -> LayerNorm:
        return LayerNorm(size, self.eps, bias=self.bias, **factory)


AnyNorm = RMSNormConfig | LayerNormConfig
