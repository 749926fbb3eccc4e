"""The families, as data: fields with their defaults in transformers, and names of tensors.

A default here is what an absent field means to the class in transformers, versions 4.57 and 5.

The families of transformers' models that our decoder can be, and which one a model is of.

    FAMILIES, then entry points of `olm_train.hf_families` --> families
    config.json   --family_of_hf-----> Family --config_from_hf--> DecoderConfig
    DecoderConfig --family_of_config-> Family --config_to_hf----> config.json
                                         `-tensors(config)-> each parameter of ours, and the tensors
                                           of theirs that it is made of (`tensors.py`)

What a family cannot express is refused with the fields that prevent it, in both directions. A
shape is expressible exactly when it comes back from its config.json, as `canonical` gives it.

This room knows configurations and names. It reads no file and lies below `checkpoint`, so that what
loads, trains and exports can all use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from olm_data import plugins
from olm_data.errors import InputError, UsageError, printable, suggest
from olm_train.extensions.hf.attention import (
    WINDOWS_BY_PATTERN,
    WINDOWS_FROM_LAYER,
    WINDOWS_WITHOUT_ROPE,
    Bias,
    LayerWindows,
    OneWindow,
    QueryScale,
    one_full_in,
)
from olm_train.extensions.hf.family import Family, Names, canonical
from olm_train.extensions.hf.fields import (
    REQUIRED,
    SOFTMAX_EXPERTS,
    Always,
    DivisibleWidth,
    EmbedScale,
    EqualHeads,
    ExpertCount,
    FixedValue,
    Json,
    Number,
    Row,
    SparseLayers,
    WholeHeads,
    WrittenOnly,
)
from olm_train.extensions.hf.positions import EqualRope, LayerRope, NoRope, TableSize
from olm_train.model.config import DecoderConfig

_ACTIVATION = FixedValue("hidden_act", ("silu", "swish"), "silu", "the activation is SiLU")


def _sizes(
    tied: bool,
    norm_eps: float,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    width: str = "intermediate_size",
) -> tuple[Row, ...]:
    """Rows of the names that nearly all families share.

    Args:
        tied, norm_eps: defaults of their fields, as are the others.
        kv_heads: None: as many as queries.
        head_dim: None: the width by the number of heads.
        width: their name of that of a feed-forward layer.
    """
    return (
        Number("vocab_size", "vocab_size", int, REQUIRED),
        Number("hidden_size", "d_model", int, REQUIRED),
        Number(width, "feed_forward.hidden_size", int, REQUIRED),
        Number("num_hidden_layers", "n_layers", int, REQUIRED),
        Number("num_attention_heads", "n_heads", int, REQUIRED),
        Number("rms_norm_eps", "norm.eps", float, norm_eps),
        Number("initializer_range", "init_std", float, 0.02, most=1.0),
        Number("tie_word_embeddings", "head.tied", bool, tied),
        Number("num_key_value_heads", "n_kv_heads", int, kv_heads, nullable=True),
        Number("head_dim", "head_dim", int, head_dim),
    )


_SWIGLU = (Always("feed_forward", "swiglu"), _ACTIVATION)
_MLP_BIAS = Number("mlp_bias", "feed_forward.bias", bool, False)
_MODULES = {"embeddings": "embed_tokens", "norm": "norm", "lm_head": "lm_head"}
_MLP = {
    "feed_forward.w_gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.w_down": ("mlp.down_proj",),
}
_ATTENTION = {
    "attention.w_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.w_out": ("self_attn.o_proj",),
}
_QK_NORM = {"attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)}
_PRE_NORM = {
    "attention_norm": ("input_layernorm",),
    "feed_forward_norm": ("post_attention_layernorm",),
}
_POST_NORM = {
    "post_attention_norm": ("post_attention_layernorm",),
    "post_feed_forward_norm": ("post_feedforward_layernorm",),
}


def _names(*blocks: Mapping[str, tuple[str, ...]]) -> Names:
    every: tuple[Mapping[str, tuple[str, ...]], ...] = (_ATTENTION, _MLP, *blocks)
    inner = {ours: theirs for each in every for ours, theirs in each.items()}
    return Names(prefix="model.", layer="layers.{}.", modules=_MODULES, blocks=inner)


_GEMMA_NORMS = {
    "attention_norm": ("input_layernorm",),
    "post_attention_norm": ("post_attention_layernorm",),
    "feed_forward_norm": ("pre_feedforward_layernorm",),
    "post_feed_forward_norm": ("post_feedforward_layernorm",),
}
_NO_DROPOUT = WrittenOnly("attention_dropout", 0.0)
_EXPERTS = {
    "feed_forward.router": ("mlp.gate",),
    "feed_forward.experts.w_gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "feed_forward.experts.w_down": ("mlp.experts.{}.down_proj",),
}
_OF_BALANCE = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Of a loss in training, which changes no logit."""

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    rows=(
        *_sizes(tied=False, norm_eps=1e-6),
        DivisibleWidth(),
        EqualRope(theta=10_000.0, positions=2048),
        *_SWIGLU,
        Bias(),
        _MLP_BIAS,
        _NO_DROPOUT,
    ),
    names=_names(_PRE_NORM),
)

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    rows=(
        *_sizes(tied=False, norm_eps=1e-6, kv_heads=32),
        EqualRope(theta=10_000.0, positions=32_768),
        *_SWIGLU,
        Always("attention.bias", "qkv"),
        WINDOWS_FROM_LAYER,
        _NO_DROPOUT,
    ),
    names=_names(_PRE_NORM),
)

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    rows=(
        *_sizes(tied=False, norm_eps=1e-6, kv_heads=32, head_dim=128),
        EqualRope(theta=10_000.0, positions=32_768),
        *_SWIGLU,
        Always("attention.qk_norm", "head"),
        Bias(),
        WINDOWS_FROM_LAYER,
        _NO_DROPOUT,
    ),
    names=_names(_PRE_NORM, _QK_NORM),
)

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    rows=(
        *_sizes(tied=False, norm_eps=1e-6, kv_heads=8),
        EqualRope(theta=10_000.0, positions=131_072),
        *_SWIGLU,
        OneWindow(4096),
        _NO_DROPOUT,
    ),
    names=_names(_PRE_NORM),
)

SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    rows=(
        *_sizes(tied=True, norm_eps=1e-6, kv_heads=4),
        EqualRope(theta=2_000_000.0, positions=32_768),
        NoRope(4),
        *_SWIGLU,
        Bias(),
        _MLP_BIAS,
        WINDOWS_WITHOUT_ROPE,
        _NO_DROPOUT,
    ),
    names=_names(_PRE_NORM),
)

OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    rows=(
        *_sizes(tied=False, norm_eps=1e-5),
        EqualRope(theta=10_000.0, positions=2048),
        *_SWIGLU,
        Always("block", "reordered_norm"),
        Always("attention.qk_norm", "full"),
        Bias(),
        _NO_DROPOUT,
    ),
    names=_names(_POST_NORM, _QK_NORM),
)

OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    rows=(
        *_sizes(tied=False, norm_eps=1e-5),
        LayerRope(theta=500_000.0, windowed=500_000.0, local=None, positions=2048),
        *_SWIGLU,
        Always("block", "reordered_norm"),
        Always("attention.qk_norm", "full"),
        Bias(),
        LayerWindows(one_full_in(4), 4096),
        _NO_DROPOUT,
    ),
    names=_names(_POST_NORM, _QK_NORM),
)


def _gemma(cap: float | None, both_ways: bool | None) -> tuple[Row, ...]:
    """Rows of both Gemmas; with the defaults of two fields."""
    return (
        *_sizes(tied=True, norm_eps=1e-6, kv_heads=4, head_dim=256),
        DivisibleWidth(),
        Always("feed_forward", "geglu"),
        FixedValue(
            "hidden_activation",
            ("gelu_pytorch_tanh", "gelu_new"),
            "gelu_pytorch_tanh",
            "the activation is GELU by tanh",
        ),
        Always("block", "peri_norm"),
        Always("norm.zero_centred", True),
        EmbedScale(),
        QueryScale(256),
        Bias(),
        Number("final_logit_softcapping", "head.softcap", float, cap, nullable=True),
        FixedValue("use_bidirectional_attention", (False, None), both_ways, "attention is causal"),
        _NO_DROPOUT,
    )


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    rows=(
        *_gemma(30.0, None),
        Number("attn_logit_softcapping", "attention.softcap", float, 50.0, nullable=True),
        EqualRope(theta=10_000.0, positions=8192),
        LayerWindows(one_full_in(2), 4096),
    ),
    names=_names(_GEMMA_NORMS),
    ignored=frozenset({"hidden_act"}),
)

GEMMA3 = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    rows=(
        *_gemma(None, False),
        FixedValue(
            "attn_logit_softcapping",
            (None,),
            None,
            "transformers reads this field and does not use it; other programs do",
        ),
        Always("attention.qk_norm", "head"),
        LayerRope(1_000_000.0, 10_000.0, local="rope_local_base_freq", positions=131_072),
        WINDOWS_BY_PATTERN,
    ),
    names=_names(_GEMMA_NORMS, _QK_NORM),
    ignored=frozenset({"hidden_act", "_sliding_window_pattern"}),
)

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    rows=(
        Number("vocab_size", "vocab_size", int, REQUIRED),
        Number("n_embd", "d_model", int, REQUIRED),
        Number("n_layer", "n_layers", int, REQUIRED),
        Number("n_head", "n_heads", int, REQUIRED),
        Number("n_inner", "feed_forward.hidden_size", int, None),
        EqualHeads(),
        WholeHeads(),
        TableSize(1024),
        Number("layer_norm_epsilon", "norm.eps", float, 1e-5),
        Number("initializer_range", "init_std", float, 0.02),
        Number("tie_word_embeddings", "head.tied", bool, True),
        Always("feed_forward", "gelu"),
        FixedValue(
            "activation_function",
            ("gelu_new", "gelu_pytorch_tanh"),
            "gelu_new",
            "the activation is GELU by tanh",
        ),
        Always("norm", "layer_norm"),
        Always("norm.bias", True),
        Always("attention.bias", "all"),
        Always("feed_forward.bias", True),
        FixedValue("scale_attn_weights", (True,), True, "products are divided by sqrt(head_dim)"),
        FixedValue(
            "scale_attn_by_inverse_layer_idx", (False,), False, "all layers scale products alike"
        ),
        *(WrittenOnly(name, 0.0) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    ),
    names=Names(
        prefix="transformer.",
        layer="h.{}.",
        modules={
            "embeddings": "wte",
            "position_embeddings": "wpe",
            "norm": "ln_f",
            "lm_head": "lm_head",
        },
        blocks={
            "attention_norm": ("ln_1",),
            "feed_forward_norm": ("ln_2",),
            "attention.w_qkv": ("attn.c_attn",),
            "attention.w_out": ("attn.c_proj",),
            "feed_forward.w_up": ("mlp.c_fc",),
            "feed_forward.w_down": ("mlp.c_proj",),
        },
        transposed=(
            "attention.w_qkv",
            "attention.w_out",
            "feed_forward.w_up",
            "feed_forward.w_down",
        ),
    ),
    ignored=frozenset(
        {"n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"}
        | {"summary_proj_to_labels", "summary_type", "summary_use_proj", "gradient_checkpointing"}
    ),
)

OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    rows=(
        *_sizes(tied=False, norm_eps=1e-5),
        WholeHeads(),
        EqualRope(theta=10_000.0, positions=4096),
        *SOFTMAX_EXPERTS,
        ExpertCount(64),
        Always("feed_forward.first_dense", 0),
        _ACTIVATION,
        Always("attention.qk_norm", "full"),
        Bias(),
        FixedValue("clip_qkv", (None,), None, "queries, keys and values are not clipped"),
        WrittenOnly("router_aux_loss_coef", 0.01),
        _NO_DROPOUT,
    ),
    names=_names(_PRE_NORM, _QK_NORM, _EXPERTS),
    ignored=_OF_BALANCE,
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rows=(
        *_sizes(tied=False, norm_eps=1e-6, kv_heads=4, width="moe_intermediate_size"),
        EqualRope(theta=10_000.0, positions=32_768),
        *SOFTMAX_EXPERTS,
        ExpertCount(128),
        SparseLayers(6144),
        _ACTIVATION,
        Always("attention.qk_norm", "head"),
        Bias(),
        OneWindow(4096, switched=True),
        WrittenOnly("router_aux_loss_coef", 0.001),
        _NO_DROPOUT,
    ),
    names=_names(_PRE_NORM, _QK_NORM, _EXPERTS),
    ignored=_OF_BALANCE | {"max_window_layers"},
)

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    MISTRAL,
    OLMO2,
    OLMO3,
    SMOLLM3,
    GEMMA3,
    GEMMA2,
    GPT2,
    OLMOE,
    QWEN3_MOE,
)
"""In this order a shape that several can express becomes the first of them."""
GROUP = "olm_train.hf_families"

__all__ = ["FAMILIES", "Family", "canonical", "families", "family_of_config", "family_of_hf"]


def families() -> Iterator[Family]:
    """Yield our families, then those that packages bring, each imported when it is come to."""
    yield from FAMILIES
    for name in plugins.names(GROUP):
        yield plugins.load(GROUP, name)


def family_of_hf(fields: Json) -> Family:
    """Return the family that a config.json is of.

    Raises:
        InputError: it is of none of `families`.
    """
    model_type, named = fields.get("model_type"), fields.get("architectures")
    found = next((family for family in families() if family.model_type == model_type), None)
    if found is None:
        said = printable(str(model_type)[:60])
        raise InputError(
            f"the model_type {said} is not one that this program knows",
            where="config.json",
            fix=suggest(said, [family.model_type for family in families()]),
        )
    if named and named != [found.architecture]:
        raise InputError(
            f"the architecture {printable(str(named)[:80])} is not that of a language model of "
            f"{found.model_type}",
            where="config.json",
            fix=f"use the weights of a {found.architecture}",
        )
    return found


def family_of_config(config: DecoderConfig) -> Family:
    """Return the first family that a shape is a model of.

    Raises:
        UsageError: there is none; names what prevents each of the nearest ones.
    """
    found = {}
    for family in families():
        found[family.name] = family.problems(config)
        if not found[family.name]:
            return family
    near = sorted(found, key=lambda name: len(found[name]))[:3]
    raise UsageError(
        "no model of transformers that this program knows has this shape:"
        + "".join(f"\n    {name}: " + "; ".join(map(str, found[name])) for name in near),
        where="model",
        fix="train it with the fields of one of these, or export it in our own format",
    )
