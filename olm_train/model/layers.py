"""The bias-free layers a block is made of: linear map, RMSNorm, rotary positions, SwiGLU.

Weights stay in their own dtype (fp32 master weights, or the bf16 copy FSDP2 gathers); every layer
computes in the dtype of its *input*, casting its weight to it. So the decoder chooses the compute
dtype once, where the embeddings enter, and one process, DDP and FSDP2 round at the same places.

Nothing here initialises a weight: see `init.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T without bias, in the dtype of x.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        parts: rows of each matrix where the weight holds several, one below the other.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parts: tuple[int, ...] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.parts = parts or (out_features,)
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019).

    The mean of squares is taken in fp32 whatever the input's dtype.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x) (Shazeer, 2020).

    `w_gate_up` holds the rows of W_gate, then those of W_up: one matrix product instead of two.
    """

    def __init__(
        self,
        d_model: int,
        hidden_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        parts = (hidden_size, hidden_size)
        self.w_gate_up = Linear(d_model, sum(parts), parts=parts, device=device, dtype=dtype)
        self.w_down = Linear(hidden_size, d_model, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d_model] to [..., d_model]."""
        gate, up = self.w_gate_up(x).chunk(2, dim=-1)  # each [..., hidden_size]
        return self.w_down(F.silu(gate) * up)


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (Su et al., 2021), in fp32.

    Args:
        positions: [b, S] integers, restarting at 0 at each document.
        head_dim: even size of a head.
        theta: base of the geometric series of wave lengths.

    Returns:
        cos, sin: each fp32 [b, S, 1, head_dim / 2], ready to multiply [b, S, heads, head_dim / 2].
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-exponents / head_dim)
    angles = positions.to(torch.float32)[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim/2]) of [b, S, heads, head_dim]; computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
