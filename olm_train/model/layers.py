"""The layers that parts are made of: linear map and embedding table.

Weights stay in their own dtype (fp32 master weights, or the bf16 copy FSDP2 gathers); every layer
computes in the dtype of its *input*, casting its weight to it. So the decoder chooses the compute
dtype once, where the embeddings enter, and one process, DDP and FSDP2 round at the same places.

Nothing here initialises a weight: see `init.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T, with a bias on request, in the dtype of x.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        parts: rows of each matrix where the weight holds several, one below the other.
        bias: add a vector.

    Attributes:
        product: of x, the weight and the bias or None, in the dtype of x.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parts: tuple[int, ...] | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.parts = parts or (out_features,)
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.product(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Module):
    """A table of vectors, weight [entries, d_model]."""

    def __init__(self, entries: int, d_model: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, d_model, **factory))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [b, S] ids: [b, S, d_model]."""
        return F.embedding(ids, self.weight)
