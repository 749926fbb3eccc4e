"""Causal attention inside documents: one signature, several back-ends, chosen by name.

A query sees a key of its own document at or before its own place, and nothing else:

    allowed(q, k) = doc_start[q] <= k <= q       and with a window: q - k < window

The signature is `attention_backend.py`'s. `sdpa`, with a dense mask, runs everywhere and is the
reference; `varlen` and `flash` are in `attention_varlen.py`, `flex` in `attention_flex.py`. A
back-end is named in the model's config and never replaced by another silently; one that cannot run
where it is asked to raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olm_data.errors import UsageError, suggest
from olm_train.model.attention_backend import AttentionBackend, DocumentLayout
from olm_train.model.attention_flex import FLEX
from olm_train.model.attention_varlen import FLASH, VARLEN
from olm_train.model.layers import Linear, build_norm
from olm_train.model.rope import rotate

if TYPE_CHECKING:
    from olm_train.model.decoder import DecoderConfig


def block_causal_mask(doc_start: Tensor, window: int | None = None) -> Tensor:
    """The boolean mask of `allowed(q, k)`, [b, 1, S, S] for doc_start [b, S]."""
    sequence_length = doc_start.shape[1]
    place = torch.arange(sequence_length, device=doc_start.device)
    causal = place[None, :] <= place[:, None]  # [S, S]
    if window is not None:  # a document seems to start where the window does
        doc_start = torch.maximum(doc_start, place - window + 1)
    own_document = place[None, None, :] >= doc_start[:, :, None]  # [b, S, S]
    return (causal & own_document)[:, None]


def _sdpa_prepare(layout: DocumentLayout) -> Tensor | None:
    if layout.doc_start is None:
        return None
    return block_causal_mask(layout.doc_start, layout.window)


def _sdpa_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
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
        enable_gqa=group > 1,
    )
    return out.transpose(1, 2)


ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": AttentionBackend(_sdpa_prepare, _sdpa_attend),
    "varlen": VARLEN,
    "flex": FLEX,
    "flash": FLASH,
}


def attention_backend(name: str) -> AttentionBackend:
    """Return the back-end called `name`; of "auto" the one that runs everywhere.

    Raises:
        UsageError: there is none of that name.
    """
    backend = ATTENTION_BACKENDS.get("sdpa" if name == "auto" else name)
    if backend is None:
        raise UsageError(
            f"unknown attention back-end {name!r}",
            where="model.attention",
            fix=suggest(name, ["auto", *ATTENTION_BACKENDS]),
        )
    return backend


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions and optional QK-norm.

    `w_qkv` holds the rows of all query heads, then key heads, then value heads. QK-norm comes
    before the rotation: over each head (Henry et al., 2020; Qwen 3), or over all at once (OLMo 2).
    """

    def __init__(self, config: DecoderConfig, **factory: Any) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.heads = (config.n_heads, config.kv_heads, config.kv_heads)
        self.attend = attention_backend(config.attention).attend
        parts = tuple(heads * self.head_dim for heads in self.heads)
        self.w_qkv = Linear(
            config.d_model, sum(parts), parts=parts, bias=config.bias is not None, **factory
        )
        self.w_out = Linear(
            config.n_heads * self.head_dim, config.d_model, bias=config.bias == "all", **factory
        )
        self.norm_whole = config.qk_norm == "full"
        q_size, k_size, _ = parts if self.norm_whole else (self.head_dim,) * 3
        self.q_norm = build_norm(config, q_size, **factory) if config.qk_norm else None
        self.k_norm = build_norm(config, k_size, **factory) if config.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, context: Any) -> Tensor:
        """Attend within documents: [b, S, d_model] -> [b, S, d_model].

        Args:
            x: input.
            rope: cos and sin as `rope_table` gives them; None: nothing is rotated.
            context: what the back-end prepared.
        """
        qkv = self.w_qkv(x).unflatten(-1, (-1, self.head_dim))  # [b, S, H + 2K, D]
        q, k, v = qkv.split(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normalise(self.q_norm, q), self._normalise(self.k_norm, k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        return self.w_out(self.attend(q, k, v, context).flatten(2))  # [b, S, H * D] -> d_model

    def _normalise(self, norm: nn.Module, x: Tensor) -> Tensor:
        if self.norm_whole:
            return norm(x.flatten(2)).view_as(x)
        return norm(x)
