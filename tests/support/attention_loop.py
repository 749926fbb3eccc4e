"""A second attention, written without any mask: documents one by one with `is_causal`.

It cannot share a fault with code that builds masks, so it is the reference for the back-ends.
`varlen_loop` has the contract of the kernels that take offsets, query by query: what torch's
`varlen_attn` and flash-attn compute, on a machine that has neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_train.model.attention import ATTENTION_BACKENDS
from olm_train.model.attention_backend import AttentionBackend, DocumentLayout, Use


def _prepare(layout: DocumentLayout) -> list[int]:
    assert layout.window is None
    return layout.offsets()[0].tolist()


def _attend(q: Tensor, k: Tensor, v: Tensor, offsets: list[int]) -> Tensor:
    group = q.shape[2] // k.shape[2]
    flat_q = q.flatten(0, 1)  # [b * S, H, D]
    flat_k, flat_v = (x.flatten(0, 1).repeat_interleave(group, dim=1) for x in (k, v))
    pieces = [
        F.scaled_dot_product_attention(
            *(x[start:end].transpose(0, 1)[None] for x in (flat_q, flat_k, flat_v)), is_causal=True
        )[0].transpose(0, 1)
        for start, end in itertools.pairwise(offsets)
        if end > start
    ]
    return torch.cat(pieces).view(q.shape)


def varlen_loop(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, left: int
) -> Tensor:
    """Causal attention inside [offset, next offset), at most `left` keys before the query.

    Args:
        q, k, v: [T, H, D], [T, K, D], [T, K, D].
        cu_seqlens: int32 [n], from 0 to T, never falling.
        max_seqlen: no document is longer.
        left: -1: all.
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
            scores = torch.einsum("hd,nhd->hn", q[place], keys) / q.shape[-1] ** 0.5
            out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
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
