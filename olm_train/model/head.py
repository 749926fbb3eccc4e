"""The last map of a decoder, normalised states to logits, as a value.

A loss that never holds all logits at once takes this apart into pieces of states and calls it on
each; the model's own `head` calls it on all of them. So both compute the same logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Head(NamedTuple):
    """A matrix and what happens to its products.

    Attributes:
        weight: [rows, d_model] in the dtype of the states; rows past the vocabulary pad it.
        vocab_size: V, the logits that count.
        softcap: logits are bent into (-this, this) by a tanh; None: they are not.
    """

    weight: Tensor
    vocab_size: int
    softcap: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the logits are the matrix product and nothing else."""
        return self.softcap is None and self.weight.shape[0] == self.vocab_size

    def logits(self, x: Tensor) -> Tensor:
        """[..., d_model] -> [..., V] in the dtype of x."""
        return self.of_products(F.linear(x, self.weight))

    def of_products(self, logits: Tensor) -> Tensor:
        """Products of states and matrix [..., rows] -> logits [..., V]."""
        if logits.shape[-1] != self.vocab_size:
            logits = logits[..., : self.vocab_size]
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
