"""The shape of a decoder: what cannot be is refused, and stated counts are the model's."""

from __future__ import annotations

from typing import Any

import pytest
from support.model_options import CONFIG, EXPERTS, GPT2, OPTIONS, PADDED

from olm_data.errors import UsageError
from olm_train.model.decoder import Decoder
from olm_train.model.part import Params
from olm_train.model.rope import PositionInterpolation

WINDOWED = {"attention": {"sliding_window": (4,)}}
TABLES = ("embeddings.weight", "lm_head.weight")


@pytest.mark.parametrize("change", [*OPTIONS, *PADDED, *EXPERTS], ids=str)
def test_stated_parameter_counts_are_the_models(change: dict[str, Any]) -> None:
    config = CONFIG.changed(**change)
    model = Decoder(config, device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = {name: size for name, size in sizes.items() if name.endswith(TABLES)}
    assert sum(sizes.values()) - sum(tables.values()) == config.num_non_embedding_params
    vocabulary = [name for name in tables if name != "position_embeddings.weight"]
    pads = (config.padded_vocab_size - 50) * config.d_model * len(vocabulary)
    assert sum(sizes.values()) - pads == config.num_params
    matrices = [p.numel() for p in model.blocks.parameters() if p.ndim > 1]
    assert sum(matrices) == Params.of(model.blocks).matrices


def with_learned(**positions: Any) -> dict[str, Any]:
    return GPT2 | {"positions": GPT2["positions"] | positions}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"n_heads": 5}, "n_heads"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"n_layers": 0}, "n_layers"),
        ({"attention": {"backend": "varlan"}}, "attention"),
        ({"block": "prenorm"}, "pre_norm"),
        ({"attention": {"qk_norm": True}}, "qk_norm"),
        ({"attention": {"shift_keys": True}, "head_dim": 2}, "shift_keys"),
        ({"feed_forward": "swiglue"}, "swiglu"),
        ({"norm": {"bias": True}}, "norm.bias"),
        ({"norm": {"eps": 0.0}}, "norm.eps"),
        ({"vocab_multiple": 0}, "vocab_multiple"),
        ({"attention": {"sliding_window": ()}}, "sliding_window"),
        ({"attention": {"sliding_window": (4, 0)}}, "sliding_window"),
        ({"positions": "learned"}, "max_positions"),
        ({"positions": {"max_positions": 64}}, "max_positions"),
        (with_learned(no_rope_layer_interval=4), "no_rope_layer_interval"),
        (with_learned(scaling=PositionInterpolation(factor=2)), "positions.scaling"),
        (with_learned(theta_windowed=9.0) | WINDOWED, "theta_windowed"),
        ({"positions": {"scaling_windowed": False}}, "scaling_windowed"),
        ({"positions": {"theta": 1.0}}, "theta"),
        ({"positions": {"theta_windowed": 100.0}}, "theta_windowed"),
        ({"positions": {"theta_windowed": 1.0}} | WINDOWED, "theta_windowed"),
        ({"norm": {"name": "layer_norm", "zero_centred": True}}, "norm.zero_centred"),
        ({"attention": {"softcap": 0.0}}, "attention.softcap"),
        ({"attention": {"query_pre_attn_scalar": 0.0}}, "query_pre_attn_scalar"),
        ({"head": {"softcap": -1.0}}, "head.softcap"),
    ],
)
def test_impossible_shapes_are_refused_by_name(change: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError) as refusal:
        CONFIG.changed(**change)
    assert where in str(refusal.value)
