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


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T, with a bias where there is one, in the dtype of x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class LinearLayer(nn.Module):
    """y = x W^T, with a bias on request, in the dtype of x.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        parts: rows of each matrix where the weight holds several, one below the other.
        bias: add a vector.

    Attributes:
        product: of input, weight and bias: wherever these are.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parts: tuple[int, ...] | None = None,
        bias: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.parts = parts or (out_features,)
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = product
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(out_features, **factory)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return self.product(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A table of vectors, weight [entries, d_model].

    Attributes:
        look_up: ids in the weight: wherever this is.
    """

    def __init__(self, entries: int, d_model: int, **factory: Any) -> None:
        super().__init__()
        self.look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding
        self.weight = nn.Parameter(torch.empty(entries, d_model, **factory))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [b, S] ids: [b, S, d_model]."""
        return self.look_up(ids, self.weight)
