"""Attention within documents: configuration, module and cost; and the back-ends, by name.

A query sees a key of its own document at or before its own place, and nothing else:

    allowed(q, k) = doc_start[q] <= k <= q       and with a window: q - k < window

How that is computed is a back-end with the signature of `attention_backend.py`: `sdpa` and `math`
are in `attention_dense.py`, `varlen` and `flash` in `attention_varlen.py`, `flex` in
`attention_flex.py`. A back-end is named in the model's config and never replaced by another
silently; one that cannot run where it is asked to raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from olm_data.config.convert import Config
from olm_data.config.hints import PositiveFloat
from olm_data.errors import UsageError, suggest
from olm_train.model.attention_backend import (
    AttentionBackend,
    KeySource,
    Scores,
    Shifted,
    keys_before,
)
from olm_train.model.attention_dense import MATH, SDPA
from olm_train.model.attention_flex import FLEX
from olm_train.model.attention_varlen import FLASH, VARLEN
from olm_train.model.layers import LinearLayer
from olm_train.model.norm import NormPart
from olm_train.model.part import FP32, Params, Saved, Sizes, require
from olm_train.model.rope import rotate
from olm_train.model.tap import NO_TAP, Tap

ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": SDPA,
    "math": MATH,
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
            where="backend",
            fix=suggest(name, ["auto", *ATTENTION_BACKENDS]),
        )
    return backend


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions and optional QK-norm.

    `w_qkv` holds the rows of all query heads, then key heads, then value heads. QK-norm comes
    before the rotation: over each head (Henry et al., 2020; Qwen 3), or over all at once (OLMo 2).

    Attributes:
        heads: those of queries, of keys and of values that are here.
        over_all: applies a norm to what is here of all heads at once.
    """

    def __init__(
        self, config: AttentionConfig, sizes: Sizes, norm: NormPart, **factory: Any
    ) -> None:
        super().__init__()
        self.head_dim = sizes.head_size
        self.heads = (sizes.n_heads, sizes.kv_heads, sizes.kv_heads)
        self.attend, self.scores = attention_backend(config.backend).attend, config.scores(sizes)
        parts = tuple(heads * self.head_dim for heads in self.heads)
        self.w_qkv = LinearLayer(
            sizes.d_model, sum(parts), parts=parts, bias=config.bias is not None, **factory
        )
        self.w_out = LinearLayer(parts[0], sizes.d_model, bias=config.bias == "all", **factory)
        self.norm_whole = config.qk_norm == "full"
        self.over_all: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__
        q_size, k_size, _ = parts if self.norm_whole else (self.head_dim,) * 3
        self.q_norm = norm.build(q_size, **factory) if config.qk_norm else None
        self.k_norm = norm.build(k_size, **factory) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        context: Any,
        tap: Tap = NO_TAP,
    ) -> Tensor:
        """Attend within documents: [b, S, d_model] -> [b, S, d_model].

        Args:
            x: input.
            rope: cos and sin as `rope_table` gives them; None: nothing is rotated.
            context: what the back-end prepared; or a `KeySource`; or one of them `Shifted`.
            tap: what looks at activations.
        """
        qkv = tap("w_qkv", self.w_qkv(x)).unflatten(-1, (-1, self.head_dim))  # [b, S, H + 2K, D]
        q, k, v = qkv.split(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q = tap("q_norm", self._normalise(self.q_norm, q))
            k = tap("k_norm", self._normalise(self.k_norm, k))
        if isinstance(context, Shifted):
            moved, context = context
            kept = isinstance(context, KeySource)
            before = context.before(k) if kept else keys_before(k, k[:, :1])
            k = torch.where(moved, before, k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if isinstance(context, KeySource):
            heads = context.attend(self.attend, q, k, v, self.scores)
        else:
            heads = self.attend(q, k, v, context, self.scores)  # [b, S, H, D]
        return tap("w_out", self.w_out(heads.flatten(2)))

    def _normalise(self, norm: nn.Module, x: Tensor) -> Tensor:
        if self.norm_whole:
            return self.over_all(norm, x.flatten(2)).view_as(x)
        return norm(x)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Attention of queries in groups, each with its keys and values.

    Attributes:
        name: queries in groups, each with its keys and values.
        bias: "qkv": of the query, key and value maps; "all": of the output map too.
        qk_norm: normalise queries and keys: "head": each head (Qwen 3), "full": all heads at once
            (OLMo 2).
        shift_keys: half of each key is that of the token before it in its document, so that one
            layer finds what followed a token like its own (induction). With RoPE it is the half
            that turns slowest. Costs nothing; no model of transformers has it.
        sliding_window: keys a query sees, its own among them, by layer; the list is repeated over
            the layers, -1 is no limit: `[4096, 4096, 4096, -1]` (OLMo 3).
        query_pre_attn_scalar: products of queries and keys are divided by the square root of this
            (Gemma). Default: head_dim.
        softcap: those products are bent into (-this, this) as logits are by `head.softcap` (Gemma
            2: 50). Back-ends math, sdpa, which then computes as math, flex and flash.
        backend: sdpa, math, varlen, flex or flash, [see below](#attention-back-ends); auto: [what
            fits the device](#what-auto-stands-for), and sdpa for a model that is built by itself.
    """

    name: Literal["grouped_query"] = "grouped_query"
    bias: Literal["qkv", "all"] | None = None
    qk_norm: Literal["head", "full"] | None = None
    shift_keys: bool = False
    sliding_window: tuple[int, ...] | None = None
    query_pre_attn_scalar: PositiveFloat | None = None
    softcap: PositiveFloat | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        attention_backend(self.backend)
        windows = self.sliding_window
        require(
            windows is None or (bool(windows) and all(w == -1 or w >= 1 for w in windows)),
            "sliding_window",
            "a window is at least 1 token, or -1 for all",
        )

    def check(self, sizes: Sizes) -> None:
        """Refuse what these sizes do not allow.

        Raises:
            UsageError: names the field.
        """
        require(
            not self.shift_keys or sizes.head_size >= 4,
            "attention.shift_keys",
            f"heads of {sizes.head_size} have no half to shift",
        )
        require(
            self.query_pre_attn_scalar is None or not sizes.scaling.table.attention,
            "attention.query_pre_attn_scalar",
            f"the parametrization {sizes.parametrization} gives the scale of attention",
        )

    def windows(self, sizes: Sizes) -> tuple[int | None, ...]:
        """Each layer's window, None where there is no limit."""
        pattern = self.sliding_window or (-1,)
        repeated = (pattern[layer % len(pattern)] for layer in range(sizes.n_layers))
        return tuple(None if window == -1 else window for window in repeated)

    def scores(self, sizes: Sizes) -> Scores:
        """Return what is done to the products of queries and keys."""
        scalar, scale = self.query_pre_attn_scalar, sizes.scaling.attention(sizes.head_size)
        return Scores(scale if scalar is None else scalar**-0.5, self.softcap)

    def build(self, sizes: Sizes, norm: NormPart, **factory: Any) -> nn.Module:
        """Return the layer of a block: its `forward` takes what `Attention.forward` does."""
        return Attention(self, sizes, norm, **factory)

    def flops(self, sizes: Sizes, norm: NormPart) -> int:
        """FLOPs of forward and backward for a token, without those of queries with keys."""
        return 6 * Params.of(self.build(sizes, norm, device="meta")).matrices

    def pair_flops(self, sizes: Sizes) -> int:
        """FLOPs of forward and backward for a query and a key that it sees."""
        return 12 * sizes.n_heads * sizes.head_size  # q.k and p.v, 2 each, times 3

    def kept(self, sizes: Sizes, saved: Saved, *, rotated: bool) -> float:
        """Bytes of activations that a token keeps for the backward pass, without the input.

        Args:
            rotated: whether positions change queries and keys.
        """
        heads, kv_heads, head = sizes.n_heads, sizes.kv_heads, sizes.head_size
        kept = (heads + 2 * kv_heads) * head  # values are a view into this product
        kept += heads * head  # output
        changed = rotated or self.qk_norm is not None
        kept += changed * (heads + kv_heads) * head  # queries and keys anew
        products = 0  # of a query with all keys: bent ones, and their softmax, fp32
        softcap, dense = self.softcap is not None, self.backend in ("sdpa", "auto")
        if self.backend == "math" or (softcap and dense):
            held = (1 + softcap) * FP32 + (saved.itemsize if saved.itemsize < FP32 else 0)
            products = heads * saved.length * held
        elif dense:
            kept += saved.length  # a row of the mask, as the kernel wants it
            if kv_heads < heads:  # keys and values for each head, not those that were changed
                kept += 2 * heads * head
                kept -= kv_heads * head * changed
        return saved.itemsize * kept + FP32 * heads + products

    def products(self, sizes: Sizes, length: int) -> int:
        """Elements that matrix products and attention give a token of a row of `length`."""
        kept = 2 * (sizes.n_heads + sizes.kv_heads) * sizes.head_size + sizes.d_model
        return kept + (sizes.n_heads * length if self.backend == "math" else 0)
