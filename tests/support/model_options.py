"""Changes of a small decoder that, together, use every option of its configuration."""

from __future__ import annotations

from typing import Any

import torch

from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters, parameter_key
from olm_train.model.rope import Llama3Scaling, PositionInterpolation, YaRNScaling

CONFIG = DecoderConfig(
    vocab_size=50, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, qk_norm="head"
)
GPT2: dict[str, Any] = {
    "positions": "learned", "max_positions": 96, "norm": "layer_norm", "norm_bias": True,
    "feed_forward": "gelu", "bias": "all", "tie_embeddings": True, "qk_norm": None,
    "n_kv_heads": None,
}  # fmt: skip
OLMO3: dict[str, Any] = {
    "block": "reordered_norm", "qk_norm": "full", "sliding_window": (5, -1),
    "rope_scaling": YaRNScaling(factor=4, old_context_len=64), "rope_scaling_windowed": False,
}  # fmt: skip
GEMMA2: dict[str, Any] = {
    "block": "peri_norm", "feed_forward": "geglu", "sliding_window": (7, 3), "embed_scale": 5.7,
    "logit_softcap": 2.0, "tie_embeddings": True, "vocab_multiple": 128, "attention_softcap": 3.0,
    "norm_zero_centred": True, "query_pre_attn_scalar": 12.0, "qk_norm": None,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    "block": "peri_norm", "feed_forward": "geglu", "sliding_window": (4, -1), "embed_scale": 5.7,
    "norm_zero_centred": True, "query_pre_attn_scalar": 12.0, "rope_theta_windowed": 50.0,
    "rope_scaling": PositionInterpolation(factor=4), "rope_scaling_windowed": False,
    "tie_embeddings": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT-2": GPT2, "OLMo 3": OLMO3, "Gemma 2": GEMMA2, "Gemma 3": GEMMA3,
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {"n_kv_heads": 4},
    {"n_kv_heads": 1},
    {"head_dim": 16},
    {"hidden_size": 40},
    {"feed_forward": "geglu"},
    {"feed_forward": "gelu"},
    {"bias": "qkv"},
    {"bias": "attention"},
    {"bias": "all"},
    {"bias": "all", "feed_forward": "gelu"},
    {"block": "reordered_norm"},
    {"block": "peri_norm"},
    {"norm": "layer_norm"},
    {"norm": "layer_norm", "norm_bias": True, "block": "peri_norm", "qk_norm": "full"},
    {"norm_eps": 0.1},
    {"qk_norm": None},
    {"qk_norm": "full"},
    {"shift_keys": True},
    {"shift_keys": True, "sliding_window": (5, -1), "qk_norm": None},
    {"positions": "learned", "max_positions": 96},
    {"rope_theta": 100.0},
    {"rope_scaling": PositionInterpolation(factor=4)},
    {"rope_scaling": Llama3Scaling(factor=8, old_context_len=32)},
    {"rope_scaling": YaRNScaling(factor=4, old_context_len=64)},
    {"no_rope_layer_interval": 2},
    {"sliding_window": (5, -1)},
    {"sliding_window": (5, -1), "rope_theta_windowed": 100.0},
    {"query_pre_attn_scalar": 3.0},
    {"attention_softcap": 0.5},
    {"attention_softcap": 0.5, "query_pre_attn_scalar": 3.0, "sliding_window": (5, -1)},
    {"embed_scale": 8.0},
    {"tie_embeddings": True},
    {"logit_softcap": 0.1},
    {"init_std": 0.05},
    GPT2,
    OLMO3,
    GEMMA2,
    GEMMA3,
]
PADDED: list[dict[str, Any]] = [
    {"vocab_multiple": 128},
    {"vocab_multiple": 16, "tie_embeddings": True},
]


@torch.no_grad()
def stirred(config: DecoderConfig, seed: int = 0) -> Decoder:
    """Build a model whose norms and biases are not at their start, where many have no effect."""
    model = Decoder(config)
    init_parameters(model, seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(parameter_key(1, name))
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model
