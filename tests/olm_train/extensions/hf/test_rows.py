"""A config.json, read and written field by field: what is wrong or unknown is named."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from olm_data.errors import InputError, UsageError
from olm_train.extensions.hf.attention import FULL, SLIDING, interval_of
from olm_train.extensions.hf.family import Family, canonical
from olm_train.extensions.hf.table import (
    GEMMA3,
    GPT2,
    LLAMA,
    MISTRAL,
    OLMO3,
    OLMOE,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
    family_of_config,
)
from olm_train.model.config import DecoderConfig
from olm_train.model.presets import preset

SMALL = DecoderConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2)


FIELDS = dict(LLAMA.config_to_hf(SMALL, max_position_embeddings=16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "8"}, "hidden_size is 8, which is not of the right type"),
        ({"hidden_size": True}, "hidden_size is true, which is not of the right type"),
        ({"num_hidden_layers": 1 << 60}, "n_layers"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide the 2 query heads"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu: the activation is SiLU"),
        ({"mlp_bias": 1}, "mlp_bias is 1"),
        ({"softmax_sink": 4}, "softmax_sink is 4, and is not known here"),
        ({"add_cross_attention": True}, "add_cross_attention is true"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "own.py"}}, "auto_map"),
        ({"initializer_range": 2.0}, "initializer_range is 2.0"),
    ],
)
def test_what_our_decoder_is_not_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        LLAMA.config_from_hf(FIELDS | change)
    assert said in str(refusal.value).replace("'", "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": -1}, "hidden_size is at least 1 and at most 262,144, not -1"),
        ({"hidden_size": 9}, "num_attention_heads is 2, which does not divide hidden_size"),
        ({"intermediate_size": 0}, "intermediate_size is at least 1 and at most 2,097,152, not 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is at least 1"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is above 0, not -1.0"),
        ({"initializer_range": -1.0}, "initializer_range is above 0, not -1.0"),
        ({"rope_theta": -5.0, "rope_parameters": None}, "rope_theta is above 1, not -5.0"),
    ],
)
def test_what_is_wrong_is_said_of_the_field_that_was_given(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as error:
        LLAMA.config_from_hf(FIELDS | change)
    assert f"LlamaForCausalLM: {said}" in error.value.what
    assert not {"d_model", "n_heads", "DecoderConfig"} & set(error.value.what.split())


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(InputError) as refusal:
        LLAMA.config_from_hf(FIELDS | {"hidden_act": "gelu", "one": 1, "two": 2})
    assert all(name in str(refusal.value) for name in ("hidden_act", "one is 1", "two is 2"))


@pytest.mark.parametrize(
    "change",
    [
        {"attention_dropout": 0.1, "use_cache": False, "torch_dtype": "bfloat16", "top_p": 0.9},
        {"is_encoder_decoder": False, "pruned_heads": {}, "something": None},
        {"vocab_size": 9.0},
    ],
)
def test_what_changes_nothing_is_no_matter(change: dict[str, Any]) -> None:
    assert LLAMA.config_from_hf(FIELDS | change) == LLAMA.config_from_hf(FIELDS)


def test_documents_may_be_of_any_length_but_it_must_be_said() -> None:
    with pytest.raises(UsageError, match="max_position_embeddings is not given"):
        LLAMA.config_to_hf(SMALL)


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


S, F = SLIDING, FULL


def qwen(**windows: Any) -> Any:
    left = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
    fields = written(QWEN3, PLAIN.changed(attention={"qk_norm": "head"}))
    return {key: value for key, value in fields.items() if key not in left} | windows


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ({}, None),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (-1, -1, 8, 8)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": [S, F, S, F]}, (8, -1)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": [F] * 4}, None),
    ],
)
def test_qwens_windows(windows: dict[str, Any], expected: tuple[int, ...] | None) -> None:
    assert QWEN3.config_from_hf(qwen(**windows)).attention.sliding_window == expected


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        ({"layer_types": [S, F, F, F], "sliding_window": 8}, "use_sliding_window is false"),
        ({"layer_types": [F]}, "layer_types is not a"),
        ({"num_hidden_layers": 1 << 60}, "num_hidden_layers is"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types is not a"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "at least 1"),
    ],
)
def test_windows_that_readers_take_for_different_ones(windows: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        QWEN3.config_from_hf(qwen(**windows))
    assert said in str(refusal.value)


def test_the_rule_of_late_layers_is_written_where_it_holds() -> None:
    for windows, first in (((-1, -1, 8, 8), 2), ((8, -1), 4), ((8,), 0), (None, 4)):
        config = PLAIN.changed(attention={"qk_norm": "head", "sliding_window": windows})
        fields = written(QWEN3, config)
        assert fields["max_window_layers"] == first
        assert fields["use_sliding_window"] == (windows is not None)


def test_the_pattern_of_gemma_is_written_where_it_holds_and_must_agree() -> None:
    for windows, every in (((8, -1), 2), ((8, 8, 8, -1), 4), ((8,), 5), (None, 1), ((-1, 8), None)):
        config = GEMMA.changed(attention={"sliding_window": windows})
        fields = written(GEMMA3, config)
        assert fields.get("sliding_window_pattern") == every
        assert fields["sliding_window"] == (4096 if windows is None else 8)
        if every is not None:
            del fields["layer_types"]
            assert GEMMA3.config_from_hf(fields).windows == config.windows
            with pytest.raises(InputError, match="sliding_window_pattern says another thing"):
                GEMMA3.config_from_hf(fields | {"layer_types": [F, S, S, S]})


def test_mistrals_window_is_of_all_layers() -> None:
    fields = written(MISTRAL, PLAIN.changed(attention={"sliding_window": (8,)}))
    assert MISTRAL.config_from_hf(fields).attention.sliding_window == (8,)
    none = MISTRAL.config_from_hf(fields | {"sliding_window": None})
    assert none.attention.sliding_window is None
    with pytest.raises(InputError, match="layer_types differs"):
        MISTRAL.config_from_hf(fields | {"layer_types": [S, F, S, F]})
    with pytest.raises(UsageError, match=r"sliding_window is not of all layers .*\[8\]"):
        written(MISTRAL, PLAIN.changed(attention={"sliding_window": (8, -1)}))


def test_windows_of_several_sizes_are_refused() -> None:
    windows = {"sliding_window": (8, 4), "qk_norm": "full"}
    olmo = PLAIN.changed(block="reordered_norm", positions={"theta": 5e5}, attention=windows)
    for family in (OLMO3, SMOLLM3):
        with pytest.raises(UsageError, match=r"several sizes, \[4, 8\] .*8 in all"):
            written(family, olmo)


def test_smollms_windows_are_those_of_layers_without_positions() -> None:
    both = {"positions": {"no_rope_layer_interval": 2}, "attention": {"sliding_window": (-1, 8)}}
    fields = written(SMOLLM3, PLAIN.changed(**both))
    for name in ("layer_types", "no_rope_layers"):
        del fields[name]
        assert SMOLLM3.config_from_hf(fields).windows == (None, 8, None, 8)


@pytest.mark.parametrize(
    ("marked", "interval"),
    [([0, 1, 0, 1], 2), ([0, 0, 0], 4), ([1, 1], 1), ([0, 1, 1], None), ([0, 0, 1, 0], 3)],
)
def test_an_interval_is_of_every_such_layer(marked: list[int], interval: int | None) -> None:
    assert interval_of([bool(each) for each in marked]) == interval


MIXTURE: dict[str, Any] = {
    "name": "moe", "n_experts": 6, "top_k": 2, "hidden_size": 24, "normalize_scores": True,
    "balance": None,
}  # fmt: skip


def shape(qk_norm: str, **options: Any) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=9, d_model=16, n_layers=4, n_heads=2, attention={"qk_norm": qk_norm},
        feed_forward=MIXTURE | options,
    )  # fmt: skip


def fields() -> dict[str, Any]:
    return written(QWEN3_MOE, shape("head"))


@pytest.mark.parametrize(("family", "qk_norm"), [(OLMOE, "full"), (QWEN3_MOE, "head")])
def test_it_is_written_and_comes_back(family: Family, qk_norm: str) -> None:
    config = shape(qk_norm)
    assert family_of_config(config) is family
    found = written(family, config)
    assert (found["num_experts"], found["num_experts_per_tok"]) == (6, 2)
    assert found["norm_topk_prob"] is True
    assert family.config_from_hf(found) == canonical(config)
    local = {name: value for name, value in found.items() if name != "num_experts"}
    assert family.config_from_hf(local | {"num_local_experts": 6}) == canonical(config)
    balanced = family.config_from_hf(
        found | {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    )
    assert balanced == canonical(config)  # no logit depends on them


def test_a_loss_for_balance_and_a_capacity_are_not_of_the_model_a_bias_is() -> None:
    config = shape("full", balance={"name": "global_aux"}, z_loss=1e-3, capacity_factor=1.0)
    assert written(OLMOE, config) == written(OLMOE, shape("full"))
    with pytest.raises(UsageError, match=r"feed_forward\.balance is bias.*has a say in who"):
        written(OLMOE, shape("full", balance={"name": "bias"}))


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"mlp_only_layers": [0, 1]}, 2),
        ({"mlp_only_layers": [1, 0], "decoder_sparse_step": 1}, 2),
        ({"mlp_only_layers": None}, 0),
        ({"mlp_only_layers": [0, 2], "decoder_sparse_step": 4}, 3),
    ],
)
def test_the_first_blocks_may_be_dense(given: dict[str, Any], first: int) -> None:
    found = QWEN3_MOE.config_from_hf(fields() | given | {"intermediate_size": 40}).feed_forward
    assert (found.first_dense, found.dense_hidden_size) == (first, 40 if first else None)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        (QWEN3_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers leaves other blocks"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers leaves other blocks"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step leaves other blocks"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts is at least 1"),
        (QWEN3_MOE, {"num_local_experts": 5}, "num_local_experts is 5, and num_experts is 6"),
        (QWEN3_MOE, {"num_experts_per_tok": 7}, "num_experts_per_tok.* 7 of 6 experts"),
        (QWEN3_MOE, {"moe_intermediate_size": 20}, "moe_intermediate_size: is no multiple of 8"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0: queries, keys and values are not clipped"),
        (OLMOE, {"head_dim": 4}, "head_dim is 4"),
        (OLMOE, {"hidden_act": "gelu"}, "hidden_act is gelu"),
        (OLMOE, {"mlp_only_layers": [0]}, "mlp_only_layers is .*not known here"),
    ],
)
def test_what_would_change_a_logit_is_refused_by_name(
    family: Family, change: dict[str, Any], said: str
) -> None:
    config = shape("full" if family is OLMOE else "head")
    with pytest.raises(InputError, match=said):
        family.config_from_hf(written(family, config) | change)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scores": "sigmoid"}, "feed_forward.scores is sigmoid"),
        ({"score_scale": 2.0}, "feed_forward.score_scale is 2.0"),
        ({"shared_hidden_size": 8}, "feed_forward.shared_hidden_size is 8"),
        ({"first_dense": 1, "dense_hidden_size": 8}, "feed_forward.first_dense is 1"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        written(OLMOE, shape("full", **options))


@pytest.mark.parametrize(("name", "family"), [("olmoe-1b-7b", OLMOE), ("qwen3-30b-a3b", QWEN3_MOE)])
def test_a_preset_is_of_its_family(name: str, family: Family) -> None:
    config = preset(name, vocab_size=9)
    assert family_of_config(config) is family
    assert family.config_from_hf(written(family, config)) == canonical(config)


def test_heads_of_olmoe_are_together_as_wide_as_the_model() -> None:
    with pytest.raises(UsageError, match="head_dim is 16"):
        written(OLMOE, replace(shape("full"), head_dim=16))
