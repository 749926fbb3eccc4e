"""A second attention, written without any mask: documents one by one with `is_causal`.

It cannot share a fault with code that builds masks, so it is the reference for the back-ends.
`varlen_loop` has the contract of the kernels that take offsets, query by query: what torch's
`varlen_attn` and flash-attn compute, on a machine that has neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_train.data.batch import Batch
from olm_train.model.attention import ATTENTION_BACKENDS
from olm_train.model.attention_backend import AttentionBackend, DocumentLayout, Scores, Use

PLAIN = Scores()


def _prepare(layout: DocumentLayout) -> list[int]:
    assert layout.window is None
    return layout.offsets()[0].tolist()


def _attend(q: Tensor, k: Tensor, v: Tensor, offsets: list[int], scores: Scores) -> Tensor:
    group = q.shape[2] // k.shape[2]
    flat_q = q.flatten(0, 1)  # [b * S, H, D]
    flat_k, flat_v = (x.flatten(0, 1).repeat_interleave(group, dim=1) for x in (k, v))
    pieces = [
        F.scaled_dot_product_attention(
            *(x[start:end].transpose(0, 1)[None] for x in (flat_q, flat_k, flat_v)),
            is_causal=True,
            scale=scores.scale,
        )[0].transpose(0, 1)
        for start, end in itertools.pairwise(offsets)
        if end > start
    ]
    return torch.cat(pieces).view(q.shape)


def varlen_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    left: int,
    scores: Scores = PLAIN,
) -> Tensor:
    """Causal attention inside [offset, next offset), at most `left` keys before the query.

    Args:
        q, k, v: [T, H, D], [T, K, D], [T, K, D].
        cu_seqlens: int32 [n], from 0 to T, never falling.
        max_seqlen: no document is longer.
        left: -1: all.
        scores: what is done to the products.
    """
    offsets = cu_seqlens.tolist()
    assert offsets[0] == 0
    assert offsets[-1] == q.shape[0]
    group, out = q.shape[1] // k.shape[1], []
    for start, end in itertools.pairwise(offsets):
        assert 0 <= end - start <= max_seqlen
        for place in range(start, end):
            first = start if left < 0 else max(start, place - left)
            keys, values = (
                x[first : place + 1].repeat_interleave(group, dim=1) for x in (k, v)
            )  # [n, H, D]
            scale = scores.scale or q.shape[-1] ** -0.5
            products = torch.einsum("hd,nhd->hn", q[place], keys) * scale
            if scores.softcap:
                products = scores.softcap * torch.tanh(products / scores.softcap)
            out.append(torch.einsum("hn,nhd->hd", products.softmax(-1), values))
    return torch.stack(out)


def cpu_backends(*, training: bool) -> list[str]:
    """Names of the back-ends that run here, in fp32."""
    use = Use(torch.device("cpu"), torch.float32, 16, training)
    return [name for name, backend in ATTENTION_BACKENDS.items() if not backend.refusal(use)]


@contextmanager
def loop_backend() -> Iterator[str]:
    """Make the reference available as a back-end; yields its name."""
    ATTENTION_BACKENDS["loop"] = AttentionBackend(_prepare, _attend)
    try:
        yield "loop"
    finally:
        del ATTENTION_BACKENDS["loop"]


ROWS = [[40, 1, 23], [64], [1, 1, 62]]


def layout_of(batch: Batch) -> DocumentLayout:
    return DocumentLayout(batch.doc_start, batch.cu_seqlens, batch.max_seqlen)


def inputs(kv_heads: int, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 64, heads, 16) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(**options) for shape in shapes]


def forward_backward(
    backend: AttentionBackend,
    layout: DocumentLayout,
    leaves: list[torch.Tensor],
    window: int | None,
    scores: Scores = PLAIN,
) -> list[torch.Tensor]:
    """Output and gradients of q, k, v for a fixed gradient of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = backend.attend(*leaves, backend.prepare(layout._replace(window=window)), scores)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
