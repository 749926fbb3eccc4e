"""Changes of a small decoder that, together, use every option of its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters, parameter_key
from olm_train.model.rope import Llama3Scaling, PositionInterpolation, YaRNScaling

CONFIG = DecoderConfig(
    vocab_size=50, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, attention={"qk_norm": "head"}
)
GPT2: dict[str, Any] = {
    "positions": {"name": "learned", "max_positions": 96},
    "norm": {"name": "layer_norm", "bias": True},
    "feed_forward": {"name": "gelu", "bias": True},
    "attention": {"bias": "all", "qk_norm": None},
    "head": {"tied": True},
    "n_kv_heads": None,
}
OLMO3: dict[str, Any] = {
    "block": "reordered_norm",
    "attention": {"qk_norm": "full", "sliding_window": (5, -1)},
    "positions": {"scaling": YaRNScaling(factor=4, old_context_len=64), "scaling_windowed": False},
}
GEMMA2: dict[str, Any] = {
    "block": "peri_norm",
    "feed_forward": "geglu",
    "attention": {
        "sliding_window": (7, 3),
        "softcap": 3.0,
        "query_pre_attn_scalar": 12.0,
        "qk_norm": None,
    },
    "embed_scale": 5.7,
    "head": {"softcap": 2.0, "tied": True},
    "vocab_multiple": 128,
    "norm": {"zero_centred": True},
}
GEMMA3: dict[str, Any] = {
    "block": "peri_norm",
    "feed_forward": "geglu",
    "attention": {"sliding_window": (4, -1), "query_pre_attn_scalar": 12.0},
    "embed_scale": 5.7,
    "norm": {"zero_centred": True},
    "positions": {
        "theta_windowed": 50.0,
        "scaling": PositionInterpolation(factor=4),
        "scaling_windowed": False,
    },
    "head": {"tied": True},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT-2": GPT2, "OLMo 3": OLMO3, "Gemma 2": GEMMA2, "Gemma 3": GEMMA3,
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {"n_kv_heads": 4},
    {"n_kv_heads": 1},
    {"head_dim": 16},
    {"feed_forward": {"hidden_size": 40}},
    {"feed_forward": "geglu"},
    {"feed_forward": "gelu"},
    {"attention": {"bias": "qkv"}},
    {"attention": {"bias": "all"}},
    {"attention": {"bias": "all"}, "feed_forward": {"bias": True}},
    {"attention": {"bias": "all"}, "feed_forward": {"bias": True, "name": "gelu"}},
    {"block": "reordered_norm"},
    {"block": "peri_norm"},
    {"norm": "layer_norm"},
    {
        "norm": {"name": "layer_norm", "bias": True},
        "block": "peri_norm",
        "attention": {"qk_norm": "full"},
    },
    {"norm": {"eps": 0.1}},
    {"attention": {"qk_norm": None}},
    {"attention": {"qk_norm": "full"}},
    {"attention": {"shift_keys": True}},
    {"attention": {"shift_keys": True, "sliding_window": (5, -1), "qk_norm": None}},
    {"positions": {"name": "learned", "max_positions": 96}},
    {"positions": {"theta": 100.0}},
    {"positions": {"scaling": PositionInterpolation(factor=4)}},
    {"positions": {"scaling": Llama3Scaling(factor=8, old_context_len=32)}},
    {"positions": {"scaling": YaRNScaling(factor=4, old_context_len=64)}},
    {"positions": {"no_rope_layer_interval": 2}},
    {"attention": {"sliding_window": (5, -1)}},
    {"attention": {"sliding_window": (5, -1)}, "positions": {"theta_windowed": 100.0}},
    {"attention": {"query_pre_attn_scalar": 3.0}},
    {"attention": {"softcap": 0.5}},
    {"attention": {"softcap": 0.5, "query_pre_attn_scalar": 3.0, "sliding_window": (5, -1)}},
    {"embed_scale": 8.0},
    {"head": {"tied": True}},
    {"head": {"softcap": 0.1}},
    {"init_std": 0.05},
    GPT2,
    OLMO3,
    GEMMA2,
    GEMMA3,
]
EXPERTS: list[dict[str, Any]] = [
    {"feed_forward": {"name": "moe", "n_experts": 5, "top_k": 2, "hidden_size": 24} | more}
    for more in (
        {},
        {"normalize_scores": True, "score_scale": 2.5, "balance": None},
        {"scores": "sigmoid", "shared_hidden_size": 40},
        {"first_dense": 1, "dense_hidden_size": 56, "balance": {"name": "sequence_aux"}},
    )
]
PADDED: list[dict[str, Any]] = [
    {"vocab_multiple": 128},
    {"vocab_multiple": 16, "head": {"tied": True}},
]


def drawn(config: DecoderConfig, seed: int = 0, **factory: Any) -> Decoder:
    """Build a model with its initial values."""
    model = Decoder(config, **factory)
    init_parameters(model, seed)
    return model


def steps_of_chance(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """Take steps on gradients that depend on the number of the step alone."""
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@torch.no_grad()
def stirred(config: DecoderConfig, seed: int = 0) -> Decoder:
    """Build a model whose norms and biases are not at their start, where many have no effect."""
    model = drawn(config, seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(parameter_key(1, name))
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model
