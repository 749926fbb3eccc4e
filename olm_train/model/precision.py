"""What is computed in more than the model's dtype: at least fp32, and never less than it has."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return fp32, of fp64 fp64."""
    return torch.promote_types(dtype, torch.float32)


def at_least_fp32(x: Tensor) -> Tensor:
    """Return `x` in fp32, or as it is in fp64."""
    return x.to(wide(x.dtype))
