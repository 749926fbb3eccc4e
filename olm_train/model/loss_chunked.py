"""The loss without all logits at once: states are taken through the head in chunks.

    forward:   for each chunk: logits -> loss and, at once, gradients of the chunk's states and of
               the head, summed in fp32                               (logits of one chunk exist)
    backward:  those gradients times the gradient that comes in

The gradients are ready when the forward pass ends, as the loss is a sum. The head is one input of
one function: under FSDP2 its weight stays gathered across the chunks and its gradient is one
tensor, so there is one reduce-scatter after the last chunk.

Source of the idea: Wijmans et al., "Cut your losses in large-vocabulary language models", 2024, in
plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_train.model.head import Head
from olm_train.model.loss import Loss, LossSums, WeighingLoss, cross_entropy_by_label
from olm_train.model.precision import at_least_fp32, wide

Sums = Callable[[Tensor, Tensor, Tensor | None], LossSums]
"""(logits [n, V], labels [n], weights [n] | None) -> LossSums."""


def chunked_loss(sums: Sums, chunk_size: int) -> WeighingLoss:
    """A loss that computes `sums` on `chunk_size` states at a time."""

    def loss(head: Head, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> LossSums:
        if not torch.is_grad_enabled():
            chunks = _chunks(x, labels, weights, chunk_size)
            return _add([sums(head.logits(a), b, c) for a, b, c in chunks])
        outputs = _Chunked.apply(x, head.weight, labels, weights, head, sums, chunk_size)  # type: ignore[no-untyped-call]
        return LossSums(*outputs)

    return loss


@torch.no_grad()
def by_label_chunked(
    head: Head,
    x: Tensor,
    labels: Tensor,
    chunk_size: int | None,
    *,
    fp32_logits: bool = False,
) -> Tensor:
    """`cross_entropy_by_label` of the head's logits, `chunk_size` states at a time; None: all.

    Args:
        fp32_logits: multiply states and head in fp32, whatever their dtype: logits in bf16 differ
            by 2^-7 of themselves and more, so that choices tie that are none.
    """
    if fp32_logits:
        head, x = head._replace(weight=at_least_fp32(head.weight)), at_least_fp32(x)
    if chunk_size is None:
        return cross_entropy_by_label(head.logits(x), labels)
    parts = [
        cross_entropy_by_label(head.logits(a)[None], b[None])[0]
        for a, b, _ in _chunks(x, labels, None, chunk_size)
    ]
    return torch.cat(parts).view_as(labels)


def with_labels(loss: Loss, chunk_size: int) -> Loss:
    """A loss that has only sums, and beside it the losses of labels by a second pass in chunks.

    Sums and gradients have the bits of `loss`. The second pass is in the precision of the other
    losses: in bf16 its sum is not the rounded one of a loss that adds up in bf16.
    """

    def both(head: Head, x: Tensor, labels: Tensor) -> LossSums:
        by_label = by_label_chunked(head, x.detach(), labels, chunk_size)
        return loss(head, x, labels)._replace(by_label=by_label.flatten())

    return both


def _chunks(
    x: Tensor, labels: Tensor, weights: Tensor | None, size: int
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """[size, d_model] states, [size] labels and weights; the last may be shorter."""
    states, places = x.flatten(0, -2).split(size), labels.flatten().split(size)
    shares = [None] * len(places) if weights is None else weights.flatten().split(size)
    return list(zip(states, places, shares, strict=True))


def _add(parts: list[LossSums]) -> LossSums:
    total, cross_entropy, z, by_label = zip(*parts, strict=True)
    return LossSums(
        torch.stack(total).sum(),
        torch.stack(cross_entropy).sum(),
        None if z[0] is None else torch.stack(z).sum(),
        None if by_label[0] is None else torch.cat(by_label),
    )


class _Chunked(torch.autograd.Function):
    """(states, weight, ...) -> (total, cross entropy, z); only the total is differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        head: Head,
        sums: Sums,
        chunk_size: int,
    ) -> LossSums:
        weight_grad = torch.zeros_like(weight, dtype=wide(weight.dtype))
        x_grads, parts = [], []
        for states, wanted, shares in _chunks(x, labels, weights, chunk_size):
            products = F.linear(states, weight).requires_grad_()
            with torch.enable_grad():
                part = sums(head.of_products(products), wanted, shares)
            (grad,) = torch.autograd.grad(part.total, products)
            x_grads.append(grad @ weight)
            if grad.dtype == weight_grad.dtype:
                weight_grad.addmm_(grad.t(), states)
            else:
                weight_grad += grad.t() @ states
            parts.append(part._replace(total=part.total.detach()))
        ctx.save_for_backward(torch.cat(x_grads).view_as(x), weight_grad.to(weight.dtype))
        added = _add(parts)
        ctx.mark_non_differentiable(*(each for each in added[1:] if each is not None))
        return added

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        scale = upstream[0]
        return (x_grad * scale).to(x_grad), (weight_grad * scale).to(weight_grad), *(None,) * 5
