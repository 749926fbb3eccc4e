"""Causal attention inside documents: one signature, several back-ends, chosen by name.

A query sees a key of its own document at or before its own place, and nothing else:

    allowed(q, k) = doc_start[q] <= k <= q       and with a window: q - k < window

The signature is `attention_backend.py`'s. `sdpa`, with a dense mask, runs everywhere and is the
reference; `varlen` and `flash` are in `attention_varlen.py`, `flex` in `attention_flex.py`. A
back-end is named in the model's config and never replaced by another silently; one that cannot run
where it is asked to raises.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_data.errors import UsageError, suggest
from olm_train.model.attention_backend import AttentionBackend, DocumentLayout, Scores
from olm_train.model.attention_flex import FLEX
from olm_train.model.attention_varlen import FLASH, VARLEN
from olm_train.model.precision import at_least_fp32


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


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Attention with a soft cap, by plain products: no kernel of torch on the CPU has one.

    Args:
        q: [..., Q, D].
        k, v: [..., S, D].
        mask: bool, broadcast to [..., Q, S]: keys that a query sees; None: all.
        scores: with a soft cap.

    Returns:
        [..., Q, D]. All products are held, in fp32.
    """
    assert scores.softcap is not None
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    products = at_least_fp32(q @ k.transpose(-1, -2) * scale)  # [..., Q, S]
    capped = scores.softcap * torch.tanh(products / scores.softcap)
    if mask is not None:
        capped = capped.masked_fill(~mask, -torch.inf)
    return capped.softmax(-1).to(v.dtype) @ v


def _sdpa_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    group = q.shape[2] // k.shape[2]
    if scores.softcap is not None:
        if mask is None:
            length = q.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()[None, None]
        grouped = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)  # [b, K, H / K, S, D]
        keys, values = (x.transpose(1, 2)[:, :, None] for x in (k, v))  # [b, K, 1, S, D]
        out = capped_attention(grouped, keys, values, mask[:, None], scores)
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)
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
            where="attention",
            fix=suggest(name, ["auto", *ATTENTION_BACKENDS]),
        )
    return backend
