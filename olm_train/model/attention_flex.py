"""Attention by torch's FlexAttention: a rule for pairs; blocks without one are left out.

The block mask is built once a micro-batch, outside the blocks. On CUDA both its making and the
attention are compiled; uncompiled they would be slower than the dense mask. On the CPU there is a
forward pass (uncompiled: the reference), and no backward pass: pytorch issue 148752.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from olm_train.model.attention_backend import (
    AttentionBackend,
    BackendRefusal,
    DocumentLayout,
    Queries,
    Scores,
    Use,
)
from olm_train.model.compiled import CompiledByKind


def _prepare(layout: DocumentLayout) -> BlockMask:
    if layout.queries is not None:
        return _prepare_queries(layout.queries, layout.window)
    doc_start, window = layout.doc_start, layout.window
    if doc_start is not None:
        (rows, length), device = doc_start.shape, doc_start.device
    else:
        offsets, length = layout.offsets()
        rows, device = None, offsets.device

    def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        pair = k <= q
        if doc_start is not None:
            pair = pair & (k >= doc_start[batch, q])
        if window is not None:
            pair = pair & (k > q - window)
        return pair

    make = _for_device(create_block_mask, device)
    return make(allowed, rows, None, length, length, device=device)


def _prepare_queries(queries: Queries, window: int | None) -> BlockMask:
    device, first, last = queries.places.device, queries.first(window), queries.places
    first, last = first.flatten(), last.flatten()

    def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= first[q]) & (k <= last[q])

    make = _for_device(create_block_mask, device)
    return make(allowed, None, None, len(first), queries.keys, device=device)


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(product, batch, head, query, key) -> what takes its place."""


@cache
def _softcap(cap: float | None) -> ScoreMod | None:
    """Return the rule of a soft cap, the same one each time: a graph is compiled for it."""
    if cap is None:
        return None

    def bend(product: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(product / cap)

    return bend


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scores: Scores) -> Tensor:
    out: Tensor = _for_device(flex_attention, q.device)(
        q.transpose(1, 2),  # [b, H, S, D]
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=_softcap(scores.softcap),
        block_mask=mask,
        scale=scores.scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _for_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    # Inside a compiled block it becomes part of that block's graph.
    if device.type != "cuda" or torch.compiler.is_compiling():
        return function
    return _compiled(function)


_compiled = cache(CompiledByKind)


def _refusal(use: Use) -> BackendRefusal | None:
    if use.device.type == "cuda" or not use.training:
        return None
    return BackendRefusal(
        f"FlexAttention has no backward pass on {use.device.type}",
        "use sdpa",
    )


FLEX = AttentionBackend(_prepare, _attend, _refusal)
