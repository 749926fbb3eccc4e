"""Causal attention inside documents: one signature, several back-ends, chosen by name.

A query sees a key of its own document at or before its own place, and nothing else:

    allowed(q, k) = doc_start[q] <= k <= q

    layout (per micro-batch)  --prepare, once-->  context  --attend, in every layer-->  output

What a back-end needs from the layout (a mask, offsets) is prepared once per micro-batch, outside
the blocks. A back-end is named in the model's config and never replaced by another silently; one
that cannot run where it is asked to raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olm_data.errors import UsageError, suggest
from olm_train.model.layers import Linear, RMSNorm, rotate


class DocumentLayout(NamedTuple):
    """Where the documents of a micro-batch of b rows of S tokens begin and end.

    Attributes:
        doc_start: int [b, S], index within the row of the first token of each token's document.
            None: each row is one document (plain causal attention).
        cu_seqlens: int32 [n], offsets of the documents in the flattened [b * S] micro-batch.
        max_seqlen: upper bound of a document's length.
    """

    doc_start: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None


@dataclass(frozen=True)
class AttentionBackend:
    """A way to compute attention.

    Attributes:
        prepare: layout -> context: a tensor, a tuple of tensors or None.
        attend: (q [b,S,H,D], k [b,S,K,D], v [b,S,K,D], context) -> [b,S,H,D], where H is a
            multiple of K and query head h reads key head h // (H // K).
    """

    prepare: Callable[[DocumentLayout], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def block_causal_mask(doc_start: Tensor) -> Tensor:
    """The boolean mask of `allowed(q, k)`, [b, 1, S, S] for doc_start [b, S]."""
    sequence_length = doc_start.shape[1]
    place = torch.arange(sequence_length, device=doc_start.device)
    causal = place[None, :] <= place[:, None]  # [S, S]
    own_document = place[None, None, :] >= doc_start[:, :, None]  # [b, S, S]
    return (causal & own_document)[:, None]


def _sdpa_prepare(layout: DocumentLayout) -> Tensor | None:
    return None if layout.doc_start is None else block_causal_mask(layout.doc_start)


def _sdpa_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # [b, H, S, D]
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": AttentionBackend(_sdpa_prepare, _sdpa_attend),
}


def attention_backend(name: str) -> AttentionBackend:
    """Return the back-end called `name`.

    Raises:
        UsageError: there is none of that name.
    """
    backend = ATTENTION_BACKENDS.get(name)
    if backend is None:
        raise UsageError(
            f"unknown attention back-end {name!r}",
            where="model.attention",
            fix=suggest(name, ATTENTION_BACKENDS),
        )
    return backend


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions and optional QK-norm.

    `w_qkv` holds the rows of all query heads, then key heads, then value heads. QK-norm is an
    RMSNorm over each head of q and k before the rotation (Henry et al., 2020).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        backend: AttentionBackend,
        qk_norm: bool,
        norm_eps: float,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.heads = (n_heads, n_kv_heads, n_kv_heads)
        self.attend = backend.attend
        parts = tuple(heads * head_dim for heads in self.heads)
        self.w_qkv = Linear(d_model, sum(parts), parts=parts, **factory)
        self.w_out = Linear(n_heads * head_dim, d_model, **factory)
        self.q_norm = RMSNorm(head_dim, norm_eps, **factory) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps, **factory) if qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: Any) -> Tensor:
        """Attend within documents: [b, S, d_model] -> [b, S, d_model]."""
        qkv = self.w_qkv(x).unflatten(-1, (-1, self.head_dim))  # [b, S, H + 2K, D]
        q, k, v = qkv.split(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v, context)
        return self.w_out(out.flatten(2))  # [b, S, H * D] -> [b, S, d_model]
