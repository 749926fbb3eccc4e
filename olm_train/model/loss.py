"""Cross entropy as a sum over valid labels; who divides by which count is the caller's business.

Labels of -100 (the next token belongs to another document, or to padding) add nothing, neither to
the sum nor to the gradient, also where no label of a micro-batch is valid.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label) in nats, fp32 scalar.

    Args:
        logits: [b, S, V], any float dtype; the soft-max is taken in fp32.
        labels: int64 [b, S], -100 where ignored.
    """
    return F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def cross_entropy_by_label(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) of each place in nats, fp32 [b, S]; 0 where the label is ignored."""
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return losses.view_as(labels)


def count_valid(labels: Tensor) -> Tensor:
    """Number of labels that count, int64 scalar on the labels' device."""
    return (labels != IGNORE_INDEX).sum(dtype=torch.int64)
