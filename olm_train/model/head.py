"""The last map of a decoder, normalised states to logits: its configuration, and itself as a value.

A loss that never holds all logits at once takes this apart into pieces of states and calls it on
each; the model's own `head` calls it on all of them. So both compute the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_data.config.convert import Config
from olm_data.config.hints import PositiveFloat
from olm_train.model.layers import LinearLayer
from olm_train.model.part import Sizes


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


@dataclass(frozen=True, kw_only=True)
class HeadConfig(Config):
    """The map from the last states to logits.

    Attributes:
        tied: use the embedding table as its matrix.
        softcap: logits are bent into (-this, this): this * tanh(logits / this) (Gemma 2: 30).
    """

    tied: bool = False
    softcap: PositiveFloat | None = None

    def build(self, sizes: Sizes, **factory: Any) -> LinearLayer | None:
        """Return the matrix, None where it is the embedding table."""
        return None if self.tied else LinearLayer(sizes.d_model, sizes.padded_vocab_size, **factory)

    def tables(self) -> int:
        """Number of tables with a row for each id: the embeddings', and the head's own."""
        return 1 if self.tied else 2
