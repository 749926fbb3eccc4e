"""The shape of a decoder: what cannot be is refused, and stated counts are the model's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.model_options import CONFIG, GPT2, OPTIONS, PADDED

from olm_data.errors import UsageError
from olm_train.model.decoder import Decoder
from olm_train.model.rope import PositionInterpolation

TABLES = ("embeddings.weight", "lm_head.weight")


@pytest.mark.parametrize("change", [*OPTIONS, *PADDED], ids=str)
def test_stated_parameter_counts_are_the_models(change: dict[str, Any]) -> None:
    config = replace(CONFIG, **change)
    model = Decoder(config, device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = {name: size for name, size in sizes.items() if name.endswith(TABLES)}
    assert sum(sizes.values()) - sum(tables.values()) == config.num_non_embedding_params
    vocabulary = [name for name in tables if name != "position_embeddings.weight"]
    pads = (config.padded_vocab_size - 50) * config.d_model * len(vocabulary)
    assert sum(sizes.values()) - pads == config.num_params
    matrices = [p.numel() for p in model.blocks.parameters() if p.ndim == 2]
    assert sum(matrices) == config.num_matrix_params


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"n_heads": 5}, "n_heads"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"n_layers": 0}, "n_layers"),
        ({"attention": "varlan"}, "attention"),
        ({"block": "prenorm"}, "pre_norm"),
        ({"qk_norm": True}, "qk_norm"),
        ({"shift_keys": True, "head_dim": 2}, "shift_keys"),
        ({"feed_forward": "swiglue"}, "swiglu"),
        ({"norm_bias": True}, "norm_bias"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"vocab_multiple": 0}, "vocab_multiple"),
        ({"sliding_window": ()}, "sliding_window"),
        ({"sliding_window": (4, 0)}, "sliding_window"),
        ({"positions": "learned"}, "max_positions"),
        ({"max_positions": 64}, "max_positions"),
        (GPT2 | {"no_rope_layer_interval": 4}, "no_rope_layer_interval"),
        (GPT2 | {"rope_scaling": PositionInterpolation(factor=2)}, "rope_scaling"),
        ({"rope_scaling_windowed": False}, "rope_scaling_windowed"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta_windowed": 100.0}, "rope_theta_windowed"),
        ({"rope_theta_windowed": 1.0, "sliding_window": (4,)}, "rope_theta_windowed"),
        (GPT2 | {"rope_theta_windowed": 9.0, "sliding_window": (4,)}, "rope_theta_windowed"),
        (GPT2 | {"norm_zero_centred": True, "norm_bias": False}, "norm_zero_centred"),
        ({"attention_softcap": 0.0}, "attention_softcap"),
        ({"query_pre_attn_scalar": 0.0}, "query_pre_attn_scalar"),
        ({"logit_softcap": -1.0}, "logit_softcap"),
    ],
)
def test_impossible_shapes_are_refused_by_name(change: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError) as refusal:
        replace(CONFIG, **change)
    assert where in str(refusal.value)
