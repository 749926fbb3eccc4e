"""How the learning rate follows a batch that grows during a run: by a factor beside the schedule's.

tokens of this step / tokens of the first step -> factor of the learning rate
"""

from __future__ import annotations

from enum import StrEnum


class LRScaling(StrEnum):
    """What the learning rate of a step is multiplied with."""

    none = "none"
    """1: the schedule alone decides."""
    sqrt = "sqrt"
    """The root of the growth of the batch, for Adam and its kin (Malladi et al. 2022)."""
    linear = "linear"
    """The growth of the batch, for plain gradient descent (Goyal et al. 2017)."""

    def factor(self, growth: float) -> float:
        """Return the factor for a batch `growth` times as large as the first one."""
        result: float = (
            growth ** {LRScaling.none: 0.0, LRScaling.sqrt: 0.5, LRScaling.linear: 1.0}[self]
        )
        return result
