"""Which family a config.json or a shape is of, and what is said where there is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.hf_models import MODELS, hf_fields, hf_model

from olm_data.errors import InputError, UsageError
from olm_train.extensions.hf.fields import nested
from olm_train.extensions.hf.table import FAMILIES, canonical, family_of_config, family_of_hf
from olm_train.model.config import DecoderConfig
from olm_train.model.rope import Llama3Scaling, PositionInterpolation, YaRNScaling

EXPERTS: dict[str, Any] = {
    "feed_forward": "moe", "feed_forward.n_experts": 4, "feed_forward.top_k": 2,
    "feed_forward.hidden_size": 24, "feed_forward.balance": None,
}  # fmt: skip
BASES: list[dict[str, Any]] = [
    {},
    {"attention.bias": "qkv"},
    {"attention.qk_norm": "head"},
    {"block": "reordered_norm", "attention.qk_norm": "full"},
    {
        "block": "peri_norm", "feed_forward": "geglu", "norm.zero_centred": True,
        "embed_scale": 16**0.5, "head.tied": True,
    },
    {
        "positions": "learned", "positions.max_positions": 96, "norm": "layer_norm",
        "norm.bias": True, "feed_forward": "gelu", "feed_forward.bias": True,
        "attention.bias": "all",
    },
    {"attention.qk_norm": "full", **EXPERTS},
    {"attention.qk_norm": "head", **EXPERTS, "feed_forward.normalize_scores": True},
]  # fmt: skip
"""Fields by name."""
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "vocab_multiple": st.sampled_from([1, 8]),
    "n_kv_heads": st.sampled_from([None, 1, 2, 4]),
    "head_dim": st.sampled_from([None, 4, 6]),
    "feed_forward.hidden_size": st.sampled_from([None, 24, 64]),
    "feed_forward.bias": st.booleans(),
    "feed_forward": st.sampled_from(["swiglu", "geglu", "gelu"]),
    "feed_forward.z_loss": st.sampled_from([0.0, 1e-3]),
    "feed_forward.balance": st.sampled_from([None, {"name": "bias"}, {"name": "aux"}]),
    "feed_forward.shared_hidden_size": st.sampled_from([None, 8]),
    "feed_forward.scores": st.sampled_from(["softmax", "sigmoid"]),
    "attention.bias": st.sampled_from([None, "qkv", "all"]),
    "block": st.sampled_from(["pre_norm", "reordered_norm", "peri_norm"]),
    "norm": st.sampled_from(["rms_norm", "layer_norm"]),
    "norm.eps": st.sampled_from([1e-6, 1e-5]),
    "norm.zero_centred": st.booleans(),
    "attention.qk_norm": st.sampled_from([None, "head", "full"]),
    "positions.theta": st.sampled_from([1e4, 5e5, 1e6]),
    "positions.theta_windowed": st.sampled_from([None, 1e4, 1e5]),
    "positions.scaling": st.sampled_from([
        None, PositionInterpolation(factor=4), Llama3Scaling(factor=8, old_context_len=32),
        YaRNScaling(factor=4, old_context_len=64), YaRNScaling(factor=4, old_context_len=3),
    ]),
    "positions.scaling_windowed": st.booleans(),
    "positions.no_rope_layer_interval": st.sampled_from([None, 1, 2, 9]),
    "attention.sliding_window": st.one_of(
        st.none(), st.lists(st.sampled_from([-1, 8]), min_size=1, max_size=5).map(tuple),
        st.just((8, 4)),
    ),
    "attention.query_pre_attn_scalar": st.sampled_from([None, 4.0, 7.0, 7.5]),
    "attention.softcap": st.sampled_from([None, 50.0]),
    "head.softcap": st.sampled_from([None, 30.0]),
    "embed_scale": st.sampled_from([1.0, 4.0, 4.0000001]),
    "head.tied": st.booleans(),
    "init_std": st.sampled_from([0.02, 2.0]),
}  # fmt: skip


@st.composite
def shapes(draw: st.DrawFn) -> DecoderConfig:
    """One of each family's, with up to four fields changed."""
    fields = {
        "vocab_size": 61, "d_model": 16, "n_layers": draw(st.integers(1, 5)), "n_heads": 4,
        **draw(st.sampled_from(BASES)),
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=4, unique=True)):
        fields[name] = draw(CHANGES[name])
    try:
        return DecoderConfig(**nested(fields))
    except UsageError:
        assume(False)
        raise


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(shapes())
def test_a_shape_is_expressible_exactly_when_it_comes_back(config: DecoderConfig) -> None:
    able = []
    for family in FAMILIES:
        problems = family.problems(config)
        if problems:
            with pytest.raises(UsageError) as refusal:
                family.config_to_hf(config, max_position_embeddings=96)
            assert all(problem.field in refusal.value.what for problem in problems)
            continue
        able.append(family)
        written = family.config_to_hf(config, max_position_embeddings=96)
        assert family_of_hf(written) is family
        assert family.config_from_hf(written) == canonical(config)
        assert canonical(canonical(config)) == canonical(config)
    if able:
        assert family_of_config(config) is able[0]
    else:
        with pytest.raises(UsageError, match="no model of transformers"):
            family_of_config(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_that_transformers_writes_comes_back(name: str) -> None:
    fields = hf_fields(hf_model(name))
    family = family_of_hf(fields)
    config = family.config_from_hf(fields)
    assert config == canonical(config)
    written = family.config_to_hf(config, max_position_embeddings=64)
    assert family_of_hf(written) is family
    assert family.config_from_hf(written) == config
    first = family_of_config(config)
    same = first.config_to_hf(config, max_position_embeddings=64)
    assert first.config_from_hf(same) == config
    flat = {"rope_theta", "rope_scaling", "rope_local_base_freq"}
    for form in (flat, {"rope_parameters"}):  # what one says of rope the other says too
        left = {key: value for key, value in written.items() if key not in form}
        assert family.config_from_hf(left) == config, form


def test_an_unknown_model_type_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'smollm3'"):
        family_of_hf({"model_type": "smollm"})


def test_another_class_of_the_same_type_is_refused() -> None:
    with pytest.raises(InputError, match="LlamaForSequenceClassification"):
        family_of_hf({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]})


def test_a_shape_of_no_family_names_what_prevents_each() -> None:
    config = DecoderConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2, head={"softcap": 3.0})
    with pytest.raises(UsageError) as refusal:
        family_of_config(config)
    assert "llama: head.softcap is 3.0 (expressible: head.softcap=null)" in str(refusal.value)


def test_a_class_of_ones_own_is_of_no_family() -> None:
    class Own(DecoderConfig):
        pass

    own = Own(vocab_size=9, d_model=8, n_layers=1, n_heads=2)
    with pytest.raises(UsageError, match="model is a Own"):
        family_of_config(own)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "llama"),
        ({"attention.bias": "qkv"}, "qwen2"),
        ({"attention.qk_norm": "head"}, "qwen3"),
        ({"attention.sliding_window": (8,)}, "mistral"),
        ({"attention.sliding_window": (8, -1)}, "smollm3"),
        ({"positions.no_rope_layer_interval": 2}, "smollm3"),
        (BASES[3], "olmo2"),
        (BASES[3] | {"attention.sliding_window": (8, -1)}, "olmo3"),
        (BASES[4] | {"attention.qk_norm": "head"}, "gemma3"),
        (BASES[4] | {"attention.softcap": 50.0}, "gemma2"),
        (BASES[5], "gpt2"),
        (BASES[6], "olmoe"),
        (BASES[7], "qwen3_moe"),
    ],
)
def test_each_family_has_shapes_of_its_own(config: dict[str, Any], name: str) -> None:
    shape = DecoderConfig(vocab_size=61, d_model=16, n_layers=2, n_heads=4)
    assert family_of_config(shape.changed(**nested(config))).name == name
