"""Cross entropy as a sum over valid labels; who divides by which count is the caller's business.

Labels of -100 (the next token belongs to another document, or to padding) add nothing, neither to
the sum nor to the gradient, also where no label of a micro-batch is valid. The z-loss pulls the
soft-max's normaliser to 1: a multiple of the sum of log(sum(exp(logits)))^2 over the same labels
(PaLM, Chowdhery et al., 2022).

    head, states [b, S, d_model], labels [b, S]  --a Loss-->  LossSums

Which loss a run takes is `loss_config.py`'s business; the one in chunks is in `loss_chunked.py`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_train.model.head import Head
from olm_train.model.precision import at_least_fp32

LOGITS_BYTES = 12
"""Peak of the plain loss, bytes a logit: in the backward pass the fp32 log-probabilities, their
gradient and the gradient of the logits, each fp32."""

IGNORE_INDEX = -100


class LossSums(NamedTuple):
    """fp32 (of a model in fp64: fp64) scalars in nats, summed over the valid labels.

    Attributes:
        total: what is differentiated.
        cross_entropy: without the z-loss, detached.
        z: the z-loss, multiplied, detached; None: there is none.
        by_label: the cross entropy of each label, detached, in the order of the labels flattened,
            0 where ignored; the computation has it anyway. None: it has not.
    """

    total: Tensor
    cross_entropy: Tensor
    z: Tensor | None
    by_label: Tensor | None = None


class Loss(Protocol):
    """A loss of states [b, S, d_model] behind a head and of labels int64 [b, S]."""

    def __call__(self, head: Head, x: Tensor, labels: Tensor) -> LossSums: ...


def z_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of log(sum(exp(logits)))^2 over the valid labels, an fp32 scalar, of fp64 logits fp64.

    Args:
        logits: [b, S, V], any float dtype.
        labels: int64 [b, S], -100 where ignored.
    """
    squares = at_least_fp32(logits).logsumexp(-1).square()  # [b, S]
    return torch.where(labels == IGNORE_INDEX, 0.0, squares).sum()


def loss_sums(logits: Tensor, labels: Tensor, z_multiplier: float | None) -> LossSums:
    """The plain loss of logits [b, S, V] and labels int64 [b, S]."""
    # F.cross_entropy in its two halves: the log-probabilities are there for the single labels too
    log_p = F.log_softmax(at_least_fp32(logits).flatten(0, -2), -1)
    target = labels.flatten()
    cross_entropy = F.nll_loss(log_p, target, ignore_index=IGNORE_INDEX, reduction="sum")
    by_label = F.nll_loss(log_p.detach(), target, ignore_index=IGNORE_INDEX, reduction="none")
    if z_multiplier is None:
        return LossSums(cross_entropy, cross_entropy.detach(), None, by_label)
    z = z_multiplier * z_sum(logits, labels)
    return LossSums(cross_entropy + z, cross_entropy.detach(), z.detach(), by_label)


def cross_entropy_by_label(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) of each place in nats, fp32 [b, S]; 0 where the label is ignored."""
    losses = F.cross_entropy(
        at_least_fp32(logits).flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return losses.view_as(labels)


def sum_by_piece(by_label: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum the losses of labels over the pieces of documents they belong to.

    The host does not wait for the device.

    Args:
        by_label: [n], one after the other.
        labels: int64, n in all; -100 where ignored.
        cu_seqlens: int32 [pieces + 1], offsets of the pieces, from 0 to n.

    Returns:
        fp64 [2, pieces]: nats, and how many labels count.
    """
    counted = (labels.flatten() != IGNORE_INDEX).to(torch.float64)
    return torch.stack(
        [
            torch.segment_reduce(each, "sum", offsets=cu_seqlens, initial=0, unsafe=True)
            for each in (by_label.detach().to(torch.float64), counted)
        ]
    )


def count_valid(labels: Tensor) -> Tensor:
    """Number of labels that count, int64 scalar on the labels' device."""
    return (labels != IGNORE_INDEX).sum(dtype=torch.int64)
