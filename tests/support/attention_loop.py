"""A second attention, written without any mask: documents one by one with `is_causal`.

It cannot share a fault with code that builds masks, so it is the reference for the back-ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from olm_train.model.attention import ATTENTION_BACKENDS, AttentionBackend, DocumentLayout


def _prepare(layout: DocumentLayout) -> list[int]:
    assert layout.cu_seqlens is not None
    return layout.cu_seqlens.tolist()


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


@contextmanager
def loop_backend() -> Iterator[str]:
    """Make the reference available as a back-end; yields its name."""
    ATTENTION_BACKENDS["loop"] = AttentionBackend(_prepare, _attend)
    try:
        yield "loop"
    finally:
        del ATTENTION_BACKENDS["loop"]
