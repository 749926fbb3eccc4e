"""The root mean square norm in 16 bits on a CPU, where torch has no kernel for it.

torch computes it there as about ten operations forward and twenty backward, each a pass over
memory. This one has five and eight, half of the time, and sums the weight's gradient in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm_in_16_bits(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return what `F.rms_norm` does, rounded once, at the end; never a second derivative.

    Args:
        x: [..., size], bf16 or fp16.
        weight: [size], any float dtype.
        eps: added to the mean of squares.
    """
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        factor = mean.add_(eps).rsqrt_()  # fp32 [..., 1]
        ctx.save_for_backward(x, weight, factor)
        return wide.mul_(factor).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor = ctx.saved_tensors
        wide_weight, size = weight.float(), x.shape[-1]
        grad, normed = upstream[0].float(), x.float().mul_(factor)
        by_weight = (grad * normed).reshape(-1, size)
        # d/dx = factor (grad weight - normed mean(grad weight normed))
        mean = torch.mv(by_weight, wide_weight).div_(-size).view_as(factor)
        x_grad = grad.mul_(wide_weight).addcmul_(normed, mean).mul_(factor)
        return x_grad.to(x.dtype), by_weight.sum(0).to(weight.dtype), None
