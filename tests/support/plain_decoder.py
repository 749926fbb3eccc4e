"""A second decoder, written from the formulas: one document, float64, a query at a time.

It has no mask, no batch and no fused product, so it shares no fault with the one it checks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from olm_train.model.config import DecoderConfig
from olm_train.model.feed_forward import SwiGLUConfig
from olm_train.model.mixture import MixtureConfig
from olm_train.model.positions import LearnedPositionsConfig
from olm_train.model.rope import Llama3Scaling, PositionInterpolation, YaRNScaling


def plain_logits(config: DecoderConfig, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [n, vocab_size] of one document of n tokens."""
    w = {name: value.double() for name, value in weights.items()}
    x = w["embeddings.weight"][ids] * config.embed_scale  # [n, d_model]
    if isinstance(config.positions, LearnedPositionsConfig):
        x = x + w["position_embeddings.weight"][: len(ids)]
    for layer in range(config.n_layers):
        part = {k.removeprefix(f"blocks.{layer}."): v for k, v in w.items()}
        for name in ("attention", "feed_forward"):
            h = (
                x
                if config.block.name == "reordered_norm"
                else _norm(config, part, f"{name}_norm", x)
            )
            h = (
                _attention(config, part, layer, h)
                if name == "attention"
                else _mlp(config.feed_forwards[layer], part, h)
            )
            if config.block.name != "pre_norm":
                h = _norm(config, part, f"post_{name}_norm", h)
            x = x + h
    head = w["embeddings.weight" if config.head.tied else "lm_head.weight"]
    logits = _norm(config, w, "norm", x) @ head[: config.vocab_size].T
    cap = config.head.softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def frequencies(config: DecoderConfig) -> list[float]:
    """Angle per token of each pair, with the scaling."""
    rope = config.positions
    d, theta, scaling = config.head_size, rope.theta, rope.scaling
    plain = [theta ** (-2 * i / d) for i in range(d // 2)]
    return (
        plain
        if scaling is None
        else [_scaled(scaling, f, i, d, theta) for i, f in enumerate(plain)]
    )


def _scaled(scaling: object, f: float, i: int, d: int, theta: float) -> float:
    if isinstance(scaling, PositionInterpolation):
        return f / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        length, low, high = 2 * math.pi / f, scaling.low_freq_factor, scaling.high_freq_factor
        if length < scaling.old_context_len / high:
            return f
        if length > scaling.old_context_len / low:
            return f / scaling.factor
        smooth = (scaling.old_context_len / length - low) / (high - low)
        return (1 - smooth) * f / scaling.factor + smooth * f
    assert isinstance(scaling, YaRNScaling)

    def number(turns: float) -> float:
        # the pair with `turns` whole turns in the old context: theta^(-2i/d) = 2 pi turns / old
        return d / 2 * math.log(scaling.old_context_len / (2 * math.pi * turns), theta)

    first = max(math.floor(number(scaling.beta_fast)), 0)
    last = min(math.ceil(number(scaling.beta_slow)), d - 1)
    stretched = min(max((i - first) / (last - first), 0.0), 1.0)
    return (1 - stretched) * f + stretched * f / scaling.factor


def _norm(config: DecoderConfig, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.norm.name == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm.eps)
    centred = getattr(config.norm, "zero_centred", False)
    return x * (w[f"{name}.weight"] + centred) + w.get(f"{name}.bias", 0.0)


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _mlp(kind: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    if isinstance(kind, MixtureConfig):
        return torch.stack([_mixture(kind, w, token) for token in x])
    if kind.name == "gelu":
        return _linear(w, "feed_forward.w_down", _gelu(_linear(w, "feed_forward.w_up", x)))
    gate, up = _linear(w, "feed_forward.w_gate_up", x).chunk(2, dim=-1)
    gate = _gelu(gate) if kind.name == "geglu" else gate / (1 + (-gate).exp())
    return _linear(w, "feed_forward.w_down", gate * up)


def _mixture(kind: MixtureConfig, w: dict[str, Tensor], token: Tensor) -> Tensor:
    """One token [d_model], expert by expert."""
    logits = (w["feed_forward.router.weight"] @ token).tolist()
    raw = [1 / (1 + math.exp(-x)) if kind.scores == "sigmoid" else math.exp(x) for x in logits]
    scores = raw if kind.scores == "sigmoid" else [x / sum(raw) for x in raw]
    biases = w.get("feed_forward.router.bias", torch.zeros(kind.n_experts)).tolist()
    wanted = [score + bias for score, bias in zip(scores, biases, strict=True)]
    chosen = sorted(range(kind.n_experts), key=lambda expert: -wanted[expert])[: kind.top_k]
    total = sum(scores[expert] for expert in chosen) if kind.normalize_scores else 1.0
    result = torch.zeros_like(token)
    for expert in chosen:
        gate, up = (w["feed_forward.experts.w_gate_up"][expert] @ token).chunk(2)
        out = w["feed_forward.experts.w_down"][expert] @ (gate / (1 + (-gate).exp()) * up)
        result = result + kind.score_scale * scores[expert] / total * out
    if kind.shared_hidden_size is None:
        return result
    shared = {k.replace("shared.", ""): v for k, v in w.items() if "feed_forward.shared." in k}
    return result + _mlp(SwiGLUConfig(), shared, token)


def _gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _attention(config: DecoderConfig, w: dict[str, Tensor], layer: int, x: Tensor) -> Tensor:
    heads, kv_heads, d = config.n_heads, config.kv_heads, config.head_size
    qkv = _linear(w, "attention.w_qkv", x)
    q, k, v = qkv.split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
    if config.attention.qk_norm == "full":
        q, k = (_norm(config, w, f"attention.{n}_norm", y) for n, y in (("q", q), ("k", k)))
    q, k, v = (y.unflatten(-1, (-1, d)) for y in (q, k, v))  # [n, heads, d]
    if config.attention.qk_norm == "head":
        q, k = (_norm(config, w, f"attention.{n}_norm", y) for n, y in (("q", q), ("k", k)))
    if config.attention.shift_keys:
        k = k.clone()
        for pair in range(d // 4, d // 2):
            for dim in (pair, pair + d // 2):
                k[1:, :, dim] = k[:-1, :, dim].clone()
    pattern = config.attention.sliding_window or (-1,)
    window = pattern[layer % len(pattern)]
    rope = config.positions
    every = getattr(rope, "no_rope_layer_interval", None)
    if rope.name == "rope" and not (every and layer % every == every - 1):
        of = config
        if window > 0:
            of = config.changed(
                positions={
                    "theta": rope.theta_windowed or rope.theta,
                    "theta_windowed": None,
                    "scaling": rope.scaling if rope.scaling_windowed else None,
                    "scaling_windowed": True,
                }
            )
        q, k = _turn(of, q), _turn(of, k)
    out, cap = torch.zeros_like(q), config.attention.softcap
    for place in range(len(x)):
        first = 0 if window < 0 else max(0, place - window + 1)
        for head in range(heads):
            of_head = head // (heads // kv_heads)
            scores = k[first : place + 1, of_head] @ q[place, head]
            scores = scores / math.sqrt(config.attention.query_pre_attn_scalar or d)
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            out[place, head] = torch.softmax(scores, 0) @ v[first : place + 1, of_head]
    return _linear(w, "attention.w_out", out.flatten(1))


def _turn(config: DecoderConfig, x: Tensor) -> Tensor:
    """Multiply the pairs, as complex numbers, by exp(i * place * frequency)."""
    d, scaling, rates = config.head_size, config.positions.scaling, frequencies(config)
    angles = torch.arange(len(x)).double()[:, None, None] * torch.tensor(rates).double()
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.exp(1j * angles)
    longer = 0.1 * math.log(scaling.factor) + 1 if isinstance(scaling, YaRNScaling) else 1.0
    return longer * torch.cat((turned.real, turned.imag), dim=-1)
