"""Attention with a mask of all queries and keys: the back-ends `sdpa` and `math`.

`sdpa` runs everywhere and is the reference; on a CPU it takes documents one by one where that is
less work. `math` holds all products of queries and keys, the fastest in bf16 on a CPU where rows
are short.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from olm_train.model.attention_backend import Attend, AttentionBackend, DocumentLayout, Scores
from olm_train.model.precision import at_least_fp32

CALL = 2048
"""Products of a query and a key that take as long as a call of the kernel, forward and back."""


def block_causal_mask(doc_start: Tensor, window: int | None = None) -> Tensor:
    """The boolean mask of `allowed(q, k)`, [b, 1, S, S] for doc_start [b, S]."""
    sequence_length = doc_start.shape[1]
    place = torch.arange(sequence_length, device=doc_start.device)
    causal = place[None, :] <= place[:, None]  # [S, S]
    if window is not None:  # a document seems to start where the window does
        doc_start = torch.maximum(doc_start, place - window + 1)
    own_document = place[None, None, :] >= doc_start[:, :, None]  # [b, S, S]
    return (causal & own_document)[:, None]


class DenseDocuments:
    """The context of a micro-batch on a CPU, whose documents are attended one by one.

    No tuple, which would be compiled anew for each micro-batch: a compiled block takes the mask.

    Args:
        doc_start, window: as in `DocumentLayout`.
    """

    def __init__(self, doc_start: Tensor, window: int | None) -> None:
        self.doc_start, self.window = doc_start, window
        begins = doc_start.numpy() == np.arange(doc_start.shape[1])
        starts = np.flatnonzero(begins).tolist()
        self.lengths = [end - start for start, end in pairwise([*starts, doc_start.numel()])]

    @property
    def worth_it(self) -> bool:
        """Whether it is less work than all products of the rows."""
        work = sum(length**2 + CALL for length in self.lengths)
        return work < self.doc_start.numel() * self.doc_start.shape[1]

    def mask(self) -> Tensor:
        """Return the mask of the whole micro-batch."""
        return block_causal_mask(self.doc_start, self.window)

    def attend(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Call `attend` on each document, with its own mask if the window is shorter."""
        parts = (x.flatten(0, 1)[None].split(self.lengths, dim=1) for x in (q, k, v))
        out = []
        for own_q, own_k, own_v in zip(*parts, strict=True):
            length, mask = own_q.shape[1], None
            if self.window is not None and length > self.window:
                mask = block_causal_mask(self.doc_start.new_zeros(1, length), self.window)
            out.append(attend(own_q, own_k, own_v, mask, scores))  # [1, length, heads, D]
        return torch.cat(out, dim=1).view_as(q)


def _mask(layout: DocumentLayout) -> Tensor | None:
    """Return which keys each query sees, bool; None: all before it."""
    if layout.queries is not None:
        return layout.queries.mask(layout.window)
    return None if layout.doc_start is None else block_causal_mask(layout.doc_start, layout.window)


def _sdpa_prepare(layout: DocumentLayout) -> DenseDocuments | Tensor | None:
    start = layout.doc_start if layout.queries is None else None
    if start is not None and start.is_cpu and not torch.compiler.is_compiling():
        documents = DenseDocuments(start, layout.window)
        if documents.worth_it:
            return documents
    return _mask(layout)


def _math_prepare(layout: DocumentLayout) -> Tensor | None:
    if (mask := _mask(layout)) is None:
        return None
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)


def attention_by_products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Attention by two matrix products and a softmax in fp32 between them.

    Args:
        q: [..., G, Q, D], the queries of G heads that share keys.
        k, v: [..., S, D].
        mask: broadcast to [..., G, Q, S]: bool, keys that a query sees, or floats that are added to
            the products; None: all are seen.
        scores: what is done to the products.

    Returns:
        [..., G, Q, D]. All products are held, in fp32 and in the dtype of `v`.
    """
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    heads = q.shape[-3:-1]
    products = at_least_fp32((q * scale).flatten(-3, -2) @ k.transpose(-1, -2))
    products = products.unflatten(-2, heads)  # [..., G, Q, S]
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    if mask is not None and mask.dtype == torch.bool:
        products = products.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        products = products.add_(mask)
    shares = products.softmax(-1).to(v.dtype).flatten(-3, -2)
    return (shares @ v).unflatten(-2, heads)


def _math_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    if mask is None:
        length = q.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()[None, None]
    grouped = q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)  # [b, K, H / K, S, D]
    keys, values = (x.transpose(1, 2) for x in (k, v))  # [b, K, S, D]
    out = attention_by_products(grouped, keys, values, mask[:, None], scores)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _sdpa_attend(
    q: Tensor, k: Tensor, v: Tensor, context: DenseDocuments | Tensor | None, scores: Scores
) -> Tensor:
    if isinstance(context, DenseDocuments):
        if not torch.compiler.is_compiling():
            return context.attend(_sdpa_attend, q, k, v, scores)
        context = context.mask()
    mask = context
    if scores.softcap is not None:  # no kernel of torch has one on a CPU
        return _math_attend(q, k, v, mask, scores)
    group = q.shape[2] // k.shape[2]
    if mask is not None and group > 1:
        # With a mask and fewer heads of keys, CUDA has the slow kernel only, which writes all b x H
        # x S x S products to memory.
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))  # [b, S, H, D]
        group = 1
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # [b, H, S, D]
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scores.scale,
        enable_gqa=group > 1,
    )
    return out.transpose(1, 2)


SDPA = AttentionBackend(_sdpa_prepare, _sdpa_attend)
MATH = AttentionBackend(_math_prepare, _math_attend)
