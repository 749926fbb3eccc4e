"""Cross entropy as a sum over valid labels; who divides by which count is the caller's business.

Labels of -100 (the next token belongs to another document, or to padding) add nothing, neither to
the sum nor to the gradient, also where no label of a micro-batch is valid. Labels may have weights,
which their losses are multiplied by. The z-loss pulls the
soft-max's normaliser to 1: a multiple of the sum of log(sum(exp(logits)))^2 over the same labels
(PaLM, Chowdhery et al., 2022).

    head, states [b, S, d_model], labels [b, S], weights [b, S] | None  --a Loss-->  LossSums

Which loss a run takes is `loss_config.py`'s business; the one in chunks is in `loss_chunked.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_train.model.head import Head
from olm_train.model.precision import at_least_fp32, wide

LOGITS_BYTES = 10
"""Peak of the plain loss, bytes a logit: it in bf16, and in fp32 a copy and the log-probability.
Logits in fp32 are not copied: 8."""

IGNORE_INDEX = -100


class LossSums(NamedTuple):
    """fp32 (of a model in fp64: fp64) scalars in nats, summed over the valid labels by weight.

    Attributes:
        total: what is differentiated.
        cross_entropy: without the z-loss, detached.
        z: the z-loss, multiplied, detached; None: there is none.
        by_label: the cross entropy of each label, not weighted, detached, in the order of the
            labels flattened, 0 where ignored; the computation has it anyway. None: it has not.
    """

    total: Tensor
    cross_entropy: Tensor
    z: Tensor | None
    by_label: Tensor | None = None


class Loss(Protocol):
    """A loss of states [b, S, d_model] behind a head and of labels int64 [b, S]."""

    def __call__(self, head: Head, x: Tensor, labels: Tensor) -> LossSums: ...


class WeighingLoss(Protocol):
    """A loss that is also given weights int32 [b, S] of the labels, where a batch has them."""

    def __call__(
        self, head: Head, x: Tensor, labels: Tensor, weights: Tensor | None = None
    ) -> LossSums: ...


def loss_sums(
    logits: Tensor, labels: Tensor, z_multiplier: float | None, weights: Tensor | None = None
) -> LossSums:
    """The plain loss of logits [b, S, V], labels int64 [b, S] and their weights."""
    total, cross_entropy, z, by_label = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2),
        labels.flatten(),
        None if weights is None else weights.flatten(),
        z_multiplier or 0.0,
    )
    return LossSums(total, cross_entropy, None if z_multiplier is None else z, by_label)


class _CrossEntropy(torch.autograd.Function):
    """(logits [n, V], labels [n], weights [n] | None, z-multiplier) -> the fields of `LossSums`.

    The gradient is written over the log-probabilities, the only large tensor that is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None, z_multiplier: float
    ) -> tuple[Tensor, ...]:
        log_p = F.log_softmax(logits, -1, dtype=wide(logits.dtype))
        valid = (labels != IGNORE_INDEX)[:, None]
        place = labels[:, None].where(valid, 0)
        normaliser = (logits.gather(1, place) - log_p.gather(1, place)).where(valid, 0)  # [n, 1]
        share = valid if weights is None else weights[:, None].where(valid, 0).to(log_p.dtype)
        ctx.save_for_backward(log_p, place, share, normaliser)
        ctx.dtype, ctx.z_multiplier = logits.dtype, z_multiplier
        z = z_multiplier * (share * normaliser.square()).sum()
        by_label = F.nll_loss(log_p, labels, ignore_index=IGNORE_INDEX, reduction="none")
        if weights is None:
            total = F.nll_loss(log_p, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        else:
            total = (share[:, 0] * by_label).sum()
        others = (total.clone(), z, by_label)
        ctx.mark_non_differentiable(*others)
        return (total + z, *others)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        log_p, place, share, normaliser = ctx.saved_tensors
        scale = upstream[0] * share  # [n, 1]
        grad = log_p.exp_().mul_(scale * (1 + 2 * ctx.z_multiplier * normaliser))
        grad.scatter_(1, place, grad.gather(1, place) - scale)
        return grad.to(ctx.dtype), None, None, None


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


def count_valid(labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Number of labels that count, or sum of their weights; int64 scalar on the labels' device."""
    valid = labels != IGNORE_INDEX
    return (valid if weights is None else weights.where(valid, 0)).sum(dtype=torch.int64)
