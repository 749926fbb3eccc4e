"""Fields of some families: biases, layers without positions, Gemma's scales, GPT-2's table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from olm_data.errors import InputError, UsageError
from olm_train.extensions.hf.family import Family
from olm_train.extensions.hf.table import GEMMA3, GPT2, LLAMA, QWEN2, QWEN3, SMOLLM3
from olm_train.model.config import DecoderConfig

PLAIN = DecoderConfig(vocab_size=9, d_model=16, n_layers=4, n_heads=2)
GEMMA = PLAIN.changed(
    block="peri_norm", feed_forward="geglu", norm={"zero_centred": True}, embed_scale=4.0,
    attention={"qk_norm": "head"},
)  # fmt: skip
TABLE = PLAIN.changed(
    positions={"name": "learned", "max_positions": 32}, norm={"name": "layer_norm", "bias": True},
    attention={"bias": "all"}, feed_forward={"name": "gelu", "bias": True},
)  # fmt: skip


def written(family: Family, config: DecoderConfig) -> dict[str, Any]:
    return {**family.config_to_hf(config, max_position_embeddings=64)}


def test_biases() -> None:
    llama = written(LLAMA, PLAIN)
    for attention, mlp in itertools.product((False, True), repeat=2):
        fields = llama | {"attention_bias": attention, "mlp_bias": mlp}
        config = LLAMA.config_from_hf(fields)
        assert config.attention.bias == ("all" if attention else None)
        assert config.feed_forward.bias == mlp
        assert written(LLAMA, config) == fields
    qkv = PLAIN.changed(attention={"bias": "qkv"})
    assert QWEN2.config_from_hf(written(QWEN2, qkv)).attention.bias == "qkv"
    all_biases = {"attention": {"bias": "all", "qk_norm": "head"}, "feed_forward": {"bias": True}}
    for family, config in ((QWEN2, PLAIN), (LLAMA, qkv), (QWEN3, PLAIN.changed(**all_biases))):
        with pytest.raises(UsageError, match="bias is"):
            written(family, config)


@pytest.mark.parametrize(
    ("change", "interval"),
    [
        ({"no_rope_layers": [1, 0, 1, 0]}, 2),
        ({"no_rope_layers": [1, 1, 1, 1]}, None),
        ({"no_rope_layers": None, "no_rope_layer_interval": 3}, 3),
        ({"no_rope_layers": None, "no_rope_layer_interval": 9}, None),
        ({"no_rope_layers": [1, 1, 1, 0, 1]}, 4),
    ],
)
def test_layers_without_positions(change: dict[str, Any], interval: int | None) -> None:
    fields = written(SMOLLM3, PLAIN) | change
    assert SMOLLM3.config_from_hf(fields).positions.no_rope_layer_interval == interval


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"no_rope_layers": [0, 1, 1, 0]}, "no fixed interval"),
        ({"no_rope_layers": [1, 2, 1, 0]}, "is not a 0 or 1"),
        ({"no_rope_layers": [1]}, "is not a 0 or 1"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "less than 1"),
    ],
)
def test_layers_without_positions_at_will_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        SMOLLM3.config_from_hf(written(SMOLLM3, PLAIN) | change)


def test_gemmas_scales() -> None:
    fields = written(GEMMA3, GEMMA)
    assert fields["query_pre_attn_scalar"] == 8  # head_dim
    assert GEMMA3.config_from_hf(fields).attention.query_pre_attn_scalar is None
    six = GEMMA3.config_from_hf(fields | {"query_pre_attn_scalar": 6})
    assert six.attention.query_pre_attn_scalar == 6
    assert (
        GEMMA3.config_from_hf(written(GEMMA3, GEMMA.changed(embed_scale=4.0000001))).embed_scale
        == 4.0
    )
    for change, said in (
        ({"embed_scale": 1.0}, r"embed_scale is 1.0 .*embed_scale=4.0, sqrt\(d_model\)"),
        ({"attention": {"query_pre_attn_scalar": 6.5}}, "query_pre_attn_scalar is 6.5 .*=6"),
        ({"norm": {"zero_centred": False}}, "norm.zero_centred is false .*=true"),
        ({"attention": {"softcap": 5.0}}, "attention.softcap is 5.0"),
        ({"attention": {"shift_keys": True}}, "shift_keys is true"),
    ):
        with pytest.raises(UsageError, match=said):
            written(GEMMA3, GEMMA.changed(**change))
    for field, value in (("attn_logit_softcapping", 50.0), ("use_bidirectional_attention", True)):
        with pytest.raises(InputError, match=f"{field} is {str(value).lower()}"):
            GEMMA3.config_from_hf(fields | {field: value})


def test_gpt2() -> None:
    fields = written(GPT2, TABLE)
    assert fields["n_positions"] == 32
    assert fields["n_inner"] == 64
    assert "max_position_embeddings" not in fields
    assert (
        GPT2.config_from_hf(fields | {"n_inner": None, "n_ctx": 32}).feed_forward.hidden_size == 64
    )
    for change, said in (
        ({"n_kv_heads": 1}, "n_kv_heads is 1 .*=2"),
        ({"head_dim": 4}, "head_dim is 4"),
        ({"norm": {"bias": False}}, "norm.bias is false"),
        ({"attention": {"bias": None}}, "attention.bias is null .*=all"),
    ):
        with pytest.raises(UsageError, match=said):
            written(GPT2, TABLE.changed(**change))
    for field in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        with pytest.raises(InputError, match=f"{field} is true"):
            GPT2.config_from_hf(fields | {field: True})
