"""Tiny models of transformers, with random weights of which none is at its start, as ours."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from olm_train.extensions.hf.table import Family, family_of_hf
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model": "Llama"},
    "llama tied, one kv head": {
        "model": "Llama", "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 16,
    },
    "llama linear": {"model": "Llama", "rope_parameters": LINEAR},
    "llama llama3": {"model": "Llama", "rope_parameters": LLAMA3},
    "llama yarn": {"model": "Llama", "rope_parameters": YARN},
    "llama biases": {"model": "Llama", "attention_bias": True, "mlp_bias": True},
    "llama bias of attention": {"model": "Llama", "attention_bias": True},
    "qwen2": {"model": "Qwen2"},
    "qwen2 windows of late layers": {
        "model": "Qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
    },
    "qwen3": {"model": "Qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3 windows": {
        "model": "Qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": YARN, "attention_bias": True,
    },
    "mistral": {"model": "Mistral", "sliding_window": 8, "head_dim": 16},
    "mistral without a window": {"model": "Mistral", "sliding_window": None},
    "smollm3": {"model": "SmolLM3", "num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "smollm3 windows": {
        "model": "SmolLM3", "use_sliding_window": True, "sliding_window": 8,
        "no_rope_layers": [1, 1, 0], "rope_parameters": LLAMA3, "tie_word_embeddings": False,
    },
    "olmo3": {
        "model": "Olmo3", "num_hidden_layers": 4, "sliding_window": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
        },
    },
    "olmo3 yarn": {
        "model": "Olmo3", "num_hidden_layers": 4, "sliding_window": 8,
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 500_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
        },
    },
    "gemma2": {
        "model": "Gemma2", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model": "Gemma3", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24,
        "num_hidden_layers": 4, "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "gemma3 capped logits": {
        "model": "Gemma3", "head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 3.0,
        "tie_word_embeddings": False,
    },
    "gpt2": {"model": "GPT2"},
    "gpt2 not tied, wide": {"model": "GPT2", "n_inner": 40, "tie_word_embeddings": False},
    "olmoe": {"model": "Olmoe", **EXPERTS, "intermediate_size": 24, "attention_bias": True},
    "olmoe normalised, tied": {
        "model": "Olmoe", **EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model": "Qwen3Moe", **EXPERTS, "moe_intermediate_size": 24, "head_dim": 16,
        "norm_topk_prob": True, "mlp_only_layers": [0], "rope_parameters": LLAMA3,
    },
    "qwen3_moe windows": {
        "model": "Qwen3Moe", **EXPERTS, "moe_intermediate_size": 16, "use_sliding_window": True,
        "sliding_window": 8, "mlp_only_layers": [0, 1], "num_experts_per_tok": 6,
    },
    "olmo2": {"model": "Olmo2"},
    "olmo2 yarn, tied": {"model": "Olmo2", "rope_parameters": YARN, "tie_word_embeddings": True},
}  # fmt: skip
"""Fields of each model beside `SIZES`, and `model`: the family in the names of its classes."""
OLD = version("transformers").startswith("4.")
if OLD:
    del MODELS["olmo2 yarn, tied"]  # refused there, for no reason in its maths


def hf_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a model of `MODELS`, in fp32 and eval mode; eager attention, the plainest there is."""
    import transformers  # takes seconds

    own = {**MODELS[name], **changes}
    kind = own.pop("model")
    fields = copy.deepcopy({**(GPT2_SIZES if kind == "GPT2" else SIZES), **own})
    if OLD:
        fields = with_flat_rope(fields)
    config = getattr(transformers, f"{kind}{'Text' * (kind == 'Gemma3')}Config")(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.3 if parameter.ndim == 1 else 0.1) * torch.randn_like(parameter)
    return model


def with_flat_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of transformers 5 as transformers 4 has them."""
    full = fields.pop("rope_parameters", None)
    if full is None:
        return fields
    if "full_attention" in full:
        if "query_pre_attn_scalar" in fields:
            fields["rope_local_base_freq"] = full["sliding_attention"]["rope_theta"]
        full = full["full_attention"]
    scaling = {key: value for key, value in full.items() if key != "rope_theta"}
    plain = full["rope_type"] == "default"
    return fields | {"rope_theta": full["rope_theta"], "rope_scaling": None if plain else scaling}


def hf_fields(model: Any) -> dict[str, Any]:
    """Return the config.json that transformers writes of a model."""
    fields: dict[str, Any] = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return fields


def hf_tensors(model: Any) -> dict[str, Tensor]:
    """Return what transformers saves of a model: no second copy of a tied table."""
    tied = getattr(model, "_tied_weights_keys", None) or {}
    dropped = set(tied) if model.config.tie_word_embeddings else set()
    state = {name: value for name, value in model.state_dict().items() if name not in dropped}
    return {each: value for name in state for each, value in _apart(name, state[name]).items()}


def _apart(name: str, value: Tensor) -> dict[str, Tensor]:
    """Each expert by itself, as files have them; transformers 5 stacks them in memory."""
    stem, _, leaf = name.rpartition(".experts.")
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
    if names is None:
        return {name: value}
    return {
        f"{stem}.experts.{number}.{each}.weight": part
        for number, expert in enumerate(value)
        for each, part in zip(names, expert.chunk(len(names)), strict=True)
    }


def take_over(model: Any, tensors: dict[str, Tensor]) -> None:
    """Give a model of transformers the tensors of its files."""
    state = {}
    for name, value in model.state_dict().items():
        parts = [tensors[each] for each in _apart(name, value) if each in tensors]
        if value.ndim == 3:
            each = len(parts) // len(value)
            parts = [
                torch.stack([torch.cat(parts[n : n + each]) for n in range(0, len(parts), each)])
            ]
        if parts:
            state[name] = parts[0]
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()


def ours_of(family: Family, config: DecoderConfig, tensors: dict[str, Tensor]) -> Decoder:
    """Return our model with the tensors of theirs, in their dtype."""
    dtype = next(iter(tensors.values())).dtype
    model, stored = Decoder(config, dtype=dtype), family.stored_names(config, tensors)
    for each, (name, parameter) in zip(
        family.tensors(config), model.named_parameters(), strict=True
    ):
        assert each.ours == name
        each.fill(parameter.data, lambda theirs, block: tensors[stored[theirs]][block])
    return model.eval()


def theirs_of(family: Family, model: Decoder) -> dict[str, Tensor]:
    """Return the tensors of theirs that our model is."""
    values = dict(model.named_parameters())
    return {
        part.name: part.of(values[each.ours].detach()[part.ours])
        for each in family.tensors(model.config)
        for part in each.parts
    }


def both(name: str, **changes: Any) -> tuple[Any, Family, Decoder]:
    """Return a model of transformers, its family, and the same model as ours."""
    theirs = hf_model(name, **changes)
    fields = hf_fields(theirs)
    family = family_of_hf(fields)
    return theirs, family, ours_of(family, family.config_from_hf(fields), hf_tensors(theirs))
