"""Fields of some families: biases, layers without positions, Gemma's scales, GPT-2's table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from olm_data.errors import InputError, UsageError
from olm_train.extensions.hf.family import Family
from olm_train.extensions.hf.table import GEMMA3, GPT2, LLAMA, QWEN2, QWEN3, SMOLLM3
from olm_train.model.config import DecoderConfig

PLAIN = DecoderConfig(vocab_size=9, d_model=16, n_layers=4, n_heads=2)
GEMMA = replace(
    PLAIN, block="peri_norm", feed_forward="geglu", norm_zero_centred=True, embed_scale=4.0,
    qk_norm="head",
)  # fmt: skip
TABLE = replace(
    PLAIN, positions="learned", max_positions=32, norm="layer_norm", norm_bias=True, bias="all",
    feed_forward="gelu",
)  # fmt: skip


def written(family: Family, config: DecoderConfig) -> dict[str, Any]:
    return {**family.config_to_hf(config, max_position_embeddings=64)}


def test_biases() -> None:
    llama = written(LLAMA, PLAIN)
    for attention, mlp, bias in (
        (False, False, None),
        (True, False, "attention"),
        (True, True, "all"),
    ):
        fields = llama | {"attention_bias": attention, "mlp_bias": mlp}
        config = LLAMA.config_from_hf(fields)
        assert config.bias == bias
        assert written(LLAMA, config) == fields
    with pytest.raises(InputError, match="mlp_bias is true without attention_bias"):
        LLAMA.config_from_hf(llama | {"mlp_bias": True})
    assert QWEN2.config_from_hf(written(QWEN2, replace(PLAIN, bias="qkv"))).bias == "qkv"
    for family, bias in ((QWEN2, None), (LLAMA, "qkv"), (QWEN3, "all")):
        with pytest.raises(UsageError, match="bias is"):
            written(family, replace(PLAIN, bias=bias, qk_norm="head" if family is QWEN3 else None))


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
    assert SMOLLM3.config_from_hf(fields).no_rope_layer_interval == interval


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
    assert GEMMA3.config_from_hf(fields).query_pre_attn_scalar is None
    assert GEMMA3.config_from_hf(fields | {"query_pre_attn_scalar": 6}).query_pre_attn_scalar == 6
    assert (
        GEMMA3.config_from_hf(written(GEMMA3, replace(GEMMA, embed_scale=4.0000001))).embed_scale
        == 4.0
    )
    for change, said in (
        ({"embed_scale": 1.0}, r"embed_scale is 1.0 .*embed_scale=4.0, sqrt\(d_model\)"),
        ({"query_pre_attn_scalar": 6.5}, "query_pre_attn_scalar is 6.5 .*=6"),
        ({"norm_zero_centred": False}, "norm_zero_centred is false .*=true"),
        ({"attention_softcap": 5.0}, "attention_softcap is 5.0"),
        ({"shift_keys": True}, "shift_keys is true"),
    ):
        with pytest.raises(UsageError, match=said):
            written(GEMMA3, replace(GEMMA, **change))
    for field, value in (("attn_logit_softcapping", 50.0), ("use_bidirectional_attention", True)):
        with pytest.raises(InputError, match=f"{field} is {str(value).lower()}"):
            GEMMA3.config_from_hf(fields | {field: value})


def test_gpt2() -> None:
    fields = written(GPT2, TABLE)
    assert fields["n_positions"] == 32
    assert fields["n_inner"] == 64
    assert "max_position_embeddings" not in fields
    assert GPT2.config_from_hf(fields | {"n_inner": None, "n_ctx": 32}).hidden_size == 64
    for change, said in (
        ({"n_kv_heads": 1}, "n_kv_heads is 1 .*=2"),
        ({"head_dim": 4}, "head_dim is 4"),
        ({"norm_bias": False}, "norm_bias is false"),
        ({"bias": None}, "bias is null .*=all"),
    ):
        with pytest.raises(UsageError, match=said):
            written(GPT2, replace(TABLE, **change))
    for field in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        with pytest.raises(InputError, match=f"{field} is true"):
            GPT2.config_from_hf(fields | {field: True})
