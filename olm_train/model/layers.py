"""The layers a block is made of: linear map, norms, attention, feed-forward.

Weights stay in their own dtype (fp32 master weights, or the bf16 copy FSDP2 gathers); every layer
computes in the dtype of its *input*, casting its weight to it. So the decoder chooses the compute
dtype once, where the embeddings enter, and one process, DDP and FSDP2 round at the same places.

Nothing here initialises a weight: see `init.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olm_train.model.attention import attention_backend
from olm_train.model.attention_backend import KeyMemory, Shifted, keys_before
from olm_train.model.config import DecoderConfig
from olm_train.model.precision import at_least_fp32
from olm_train.model.rms_norm import rms_norm_on_cpu
from olm_train.model.rope import rotate
from olm_train.model.tap import NO_TAP, Tap


class Linear(nn.Module):
    """y = x W^T, with a bias on request, in the dtype of x.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        parts: rows of each matrix where the weight holds several, one below the other.
        bias: add a vector.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        parts: tuple[int, ...] | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.parts = parts or (out_features,)
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019).

    The mean of squares is taken in fp32 whatever the input's dtype.

    Args:
        size: of the last dimension.
        eps: added to the mean of squares.
        zero_centred: multiply by 1 + weight.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        zero_centred: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, zero_centred
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; same shape and dtype."""
        weight = 1 + at_least_fp32(self.weight) if self.zero_centred else self.weight
        weight = weight.to(x.dtype)
        if x.is_cpu and not torch.compiler.is_compiling():
            return rms_norm_on_cpu(x, weight, self.eps)
        return F.rms_norm(x, self.weight.shape, weight, self.eps)


class LayerNorm(nn.Module):
    """Normalisation to mean 0 and variance 1 over the last dimension (Ba et al., 2016).

    Mean and variance are taken in fp32 whatever the input's dtype.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; same shape and dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps)


def build_norm(config: DecoderConfig, size: int, **factory: Any) -> RMSNorm | LayerNorm:
    """Build the norm that the config names, over a last dimension of `size`."""
    if config.norm == "layer_norm":
        return LayerNorm(size, config.norm_eps, bias=config.norm_bias, **factory)
    return RMSNorm(size, config.norm_eps, zero_centred=config.norm_zero_centred, **factory)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions and optional QK-norm.

    `w_qkv` holds the rows of all query heads, then key heads, then value heads. QK-norm comes
    before the rotation: over each head (Henry et al., 2020; Qwen 3), or over all at once (OLMo 2).
    """

    def __init__(self, config: DecoderConfig, **factory: Any) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.heads = (config.n_heads, config.kv_heads, config.kv_heads)
        self.attend, self.scores = attention_backend(config.attention).attend, config.scores
        parts = tuple(heads * self.head_dim for heads in self.heads)
        self.w_qkv = Linear(
            config.d_model, sum(parts), parts=parts, bias=config.bias is not None, **factory
        )
        self.w_out = Linear(
            config.n_heads * self.head_dim,
            config.d_model,
            bias=config.bias in ("attention", "all"),
            **factory,
        )
        self.norm_whole = config.qk_norm == "full"
        q_size, k_size, _ = parts if self.norm_whole else (self.head_dim,) * 3
        self.q_norm = build_norm(config, q_size, **factory) if config.qk_norm else None
        self.k_norm = build_norm(config, k_size, **factory) if config.qk_norm else None

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
            context: what the back-end prepared; or a memory of keys; or one of them `Shifted`.
            tap: what looks at activations.
        """
        qkv = tap("w_qkv", self.w_qkv(x)).unflatten(-1, (-1, self.head_dim))  # [b, S, H + 2K, D]
        q, k, v = qkv.split(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q = tap("q_norm", self._normalise(self.q_norm, q))
            k = tap("k_norm", self._normalise(self.k_norm, k))
        if isinstance(context, Shifted):
            moved, context = context
            kept = isinstance(context, KeyMemory)
            before = context.before(k) if kept else keys_before(k, k[:, :1])
            k = torch.where(moved, before, k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if isinstance(context, KeyMemory):
            heads = context.attend(self.attend, q, k, v, self.scores)
        else:
            heads = self.attend(q, k, v, context, self.scores)  # [b, S, H, D]
        return tap("w_out", self.w_out(heads.flatten(2)))

    def _normalise(self, norm: nn.Module, x: Tensor) -> Tensor:
        if self.norm_whole:
            return norm(x.flatten(2)).view_as(x)
        return norm(x)


class GatedFeedForward(nn.Module):
    """W_down (activation(W_gate x) * W_up x): SwiGLU or GeGLU (Shazeer, 2020).

    `w_gate_up` holds the rows of W_gate, then those of W_up: one matrix product instead of two.

    Args:
        d_model: size of the last dimension of input and output.
        hidden_size: size between.
        activation: "silu" or "gelu" (the approximation with tanh, as Gemma's).
        bias: of both linear maps.
    """

    def __init__(
        self, d_model: int, hidden_size: int, *, activation: str, bias: bool, **factory: Any
    ) -> None:
        super().__init__()
        self.gelu = activation == "gelu"
        parts = (hidden_size, hidden_size)
        self.w_gate_up = Linear(d_model, sum(parts), parts=parts, bias=bias, **factory)
        self.w_down = Linear(hidden_size, d_model, bias=bias, **factory)

    def forward(self, x: Tensor, tap: Tap = NO_TAP) -> Tensor:
        """Map [..., d_model] to [..., d_model]; `tap` looks at activations."""
        gate, up = tap("w_gate_up", self.w_gate_up(x)).chunk(2, dim=-1)  # each [..., hidden_size]
        active = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return tap("w_down", self.w_down(active * up))


class FeedForward(nn.Module):
    """W_down gelu(W_up x), with GPT-2's approximation of gelu by tanh."""

    def __init__(self, d_model: int, hidden_size: int, *, bias: bool, **factory: Any) -> None:
        super().__init__()
        self.w_up = Linear(d_model, hidden_size, bias=bias, **factory)
        self.w_down = Linear(hidden_size, d_model, bias=bias, **factory)

    def forward(self, x: Tensor, tap: Tap = NO_TAP) -> Tensor:
        """Map [..., d_model] to [..., d_model]; `tap` looks at activations."""
        up = tap("w_up", self.w_up(x))  # [..., hidden_size]
        return tap("w_down", self.w_down(F.gelu(up, approximate="tanh")))


def build_feed_forward(config: DecoderConfig, **factory: Any) -> GatedFeedForward | FeedForward:
    """Build the feed-forward layer that the config names."""
    sizes, bias = (config.d_model, config.ffn_size), config.bias == "all"
    if config.feed_forward == "gelu":
        return FeedForward(*sizes, bias=bias, **factory)
    activation = {"swiglu": "silu", "geglu": "gelu"}[config.feed_forward]
    return GatedFeedForward(*sizes, activation=activation, bias=bias, **factory)
