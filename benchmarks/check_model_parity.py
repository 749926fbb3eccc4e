"""Does our decoder compute the same logits as the transformers library's models?

    python -m venv ./parity && ./parity/bin/pip install torch==2.13.0 transformers==5.23.0
    ./parity/bin/python benchmarks/check_model_parity.py

For each family: a small model of the library's own code, random weights (norms and biases too),
the same weights in our decoder, the same token ids in fp32 on the CPU. Prints the largest logit
and the largest difference of two logits; exits 1 if a difference is above 1e-5 of the largest
logit, or if ours comes as close without the option that a case is about (it would show nothing).

    transformers config -> its model --weights--> our decoder
                              |                       |
                            logits  -- compared --  logits

Together the families use every option of `DecoderConfig` that changes what is computed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.rope import Llama3Scaling, PositionInterpolation, YaRNScaling

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 96, 64, 4, 4, 96
TOLERANCE = 1e-5
THEIRS = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": 112,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
OURS = DecoderConfig(
    vocab_size=VOCABULARY, vocab_multiple=128, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS,
    n_kv_heads=2, hidden_size=112,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A family: the library's class prefix and configuration, and ours.

    Attributes:
        name: shown.
        family: prefix of the library's classes.
        theirs: fields of its configuration beside `THEIRS`.
        ours: fields of our configuration beside `OURS`.
        missing: fields of `ours` whose loss the comparison must notice.
    """

    name: str
    family: str
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def rope(kind: str, **options: Any) -> dict[str, Any]:
    """Return the library's rotary parameters."""
    return {"rope_type": kind, "rope_theta": 10_000.0, **options}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0}
OLD = {"original_max_position_embeddings": 64}
CASES = (
    Case(
        "GPT-2", "GPT2",
        {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128, "n_inner": 112,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True},
        {"n_kv_heads": None, "norm": "layer_norm", "norm_bias": True, "norm_eps": 1e-5,
         "feed_forward": "gelu", "bias": "all", "positions": "learned", "max_positions": 128,
         "tie_embeddings": True},
    ),
    Case("Llama 2", "Llama"),
    Case("Llama 2, grouped heads of another size, theta 500,000", "Llama",
         {"num_key_value_heads": 1, "head_dim": 32, "rope_parameters": rope("default") | {
             "rope_theta": 500_000.0}},
         {"n_kv_heads": 1, "head_dim": 32, "rope_theta": 500_000.0}, ("rope_theta",)),
    Case("Llama, position interpolation", "Llama",
         {"rope_parameters": rope("linear", factor=4.0)},
         {"rope_scaling": PositionInterpolation(factor=4.0)}, ("rope_scaling",)),
    Case("Llama 3.1", "Llama",
         {"rope_parameters": rope("llama3", **LLAMA3, **OLD)},
         {"rope_scaling": Llama3Scaling(factor=8.0, old_context_len=64)}, ("rope_scaling",)),
    Case("Llama, YaRN", "Llama",
         {"rope_parameters": rope("yarn", **YARN, **OLD)},
         {"rope_scaling": YaRNScaling(factor=2.0, old_context_len=64)}, ("rope_scaling",)),
    Case("Llama with biases", "Llama", {"attention_bias": True, "mlp_bias": True},
         {"bias": "all"}),
    Case("OLMo 2", "Olmo2", {}, {"block": "reordered_norm", "qk_norm": "full"}),
    Case("OLMo 3", "Olmo3",
         {"sliding_window": 7, "rope_parameters": {
             "sliding_attention": rope("default"), "full_attention": rope("default")}},
         {"block": "reordered_norm", "qk_norm": "full", "sliding_window": (7, 7, 7, -1)},
         ("sliding_window",)),
    Case("OLMo 3, YaRN on the layers without a window", "Olmo3",
         {"sliding_window": 7, "rope_parameters": {
             "sliding_attention": rope("default"), "full_attention": rope("yarn", **YARN, **OLD)}},
         {"block": "reordered_norm", "qk_norm": "full", "sliding_window": (7, 7, 7, -1),
          "rope_scaling": YaRNScaling(factor=2.0, old_context_len=64),
          "rope_scaling_windowed": False},
         ("rope_scaling_windowed",)),
    Case("Qwen 2", "Qwen2", {"use_sliding_window": False}, {"bias": "qkv"}),
    Case("Qwen 3", "Qwen3", {"head_dim": 16, "tie_word_embeddings": True},
         {"qk_norm": "head", "tie_embeddings": True}),
    Case("SmolLM 3", "SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": False,
          "rope_parameters": rope("default")},
         {"no_rope_layer_interval": 2}, ("no_rope_layer_interval",)),
    Case("Gemma 2 without its cap of attention", "Gemma2",
         {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7,
          "attn_logit_softcapping": None, "final_logit_softcapping": 3.0,
          "tie_word_embeddings": True},
         {"block": "peri_norm", "feed_forward": "geglu", "sliding_window": (7, -1),
          "embed_scale": WIDTH**0.5, "logit_softcap": 3.0, "tie_embeddings": True},
         ("sliding_window", "embed_scale", "logit_softcap", "feed_forward")),
)  # fmt: skip
NORMS = {
    "pre_norm": {"attention_norm": "input_layernorm",
                 "feed_forward_norm": "post_attention_layernorm"},
    "reordered_norm": {"post_attention_norm": "post_attention_layernorm",
                       "post_feed_forward_norm": "post_feedforward_layernorm"},
    "peri_norm": {"attention_norm": "input_layernorm",
                  "post_attention_norm": "post_attention_layernorm",
                  "feed_forward_norm": "pre_feedforward_layernorm",
                  "post_feed_forward_norm": "post_feedforward_layernorm"},
}  # fmt: skip


def their_model(case: Case) -> torch.nn.Module:
    """Build the library's model with random weights."""
    import transformers

    config = getattr(transformers, f"{case.family}Config")(
        **THEIRS | case.theirs, attn_implementation="eager"
    )
    class_name = "GPT2LMHeadModel" if case.family == "GPT2" else f"{case.family}ForCausalLM"
    model = getattr(transformers, class_name)(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter += 0.3 * noise
        else:
            parameter.copy_(0.15 * noise)
    return model


def gpt2_weights(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name GPT-2's weights as ours; its matrices are the other way round."""
    yield "embeddings.weight", state["transformer.wte.weight"]
    yield "position_embeddings.weight", state["transformer.wpe.weight"]
    places = {
        "ln_1": "attention_norm", "attn.c_attn": "attention.w_qkv",
        "attn.c_proj": "attention.w_out", "ln_2": "feed_forward_norm",
        "mlp.c_fc": "feed_forward.w_up", "mlp.c_proj": "feed_forward.w_down",
    }  # fmt: skip
    for part in ("weight", "bias"):
        yield f"norm.{part}", state[f"transformer.ln_f.{part}"]
        for layer in range(LAYERS):
            for theirs, ours in places.items():
                value = state[f"transformer.h.{layer}.{theirs}.{part}"]
                yield f"blocks.{layer}.{ours}.{part}", value.T if value.ndim == 2 else value


def other_weights(
    state: dict[str, Tensor], config: DecoderConfig, shift: float
) -> Iterator[tuple[str, Tensor]]:
    """Name the weights of the Llama-like families as ours; `shift` is added to those of norms."""
    yield "embeddings.weight", state["model.embed_tokens.weight"]
    yield "norm.weight", state["model.norm.weight"] + shift
    if not config.tie_embeddings:
        yield "lm_head.weight", state["lm_head.weight"]
    joined = {
        "attention.w_qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.w_out": ["self_attn.o_proj"],
        "feed_forward.w_gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "feed_forward.w_down": ["mlp.down_proj"],
    }
    norms = dict(NORMS[config.block])
    if config.qk_norm:
        norms |= {f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
    for layer in range(LAYERS):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        for name, place in norms.items():
            yield f"{ours}.{name}.weight", state[f"{theirs}.{place}.weight"] + shift
        for name, places in joined.items():
            for part in ("weight", "bias"):
                found = [state.get(f"{theirs}.{place}.{part}") for place in places]
                if found[0] is not None:
                    yield f"{ours}.{name}.{part}", torch.cat([x for x in found if x is not None])


def our_logits(config: DecoderConfig, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits of our decoder with these weights; rows that pad the vocabulary are zeros."""
    model = Decoder(config, dtype=torch.float32)
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys(), own.keys() ^ weights.keys()
    for name, parameter in own.items():
        parameter.zero_()
        parameter[: len(weights[name])] = weights[name]
    return model(ids)


def compare(case: Case) -> tuple[float, float, float]:
    """Return the largest logit, the largest difference, and the least without an option."""
    config = replace(OURS, **case.ours)
    model = their_model(case)
    state = model.state_dict()
    named = (
        gpt2_weights(state)
        if case.family == "GPT2"
        else other_weights(state, config, 1.0 if case.family == "Gemma2" else 0.0)
    )
    weights = dict(named)
    ids = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    theirs = model(ids).logits
    difference = (our_logits(config, weights, ids) - theirs).abs().max()
    without = [
        (our_logits(replace(config, **{name: getattr(OURS, name)}), weights, ids) - theirs)
        .abs()
        .max()
        for name in case.missing
    ]
    return float(theirs.abs().max()), float(difference), float(min(without, default=torch.inf))


@torch.no_grad()
def main() -> int:
    """Compare every family and print a line for each."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    import transformers

    print(f"transformers {transformers.__version__}, torch {torch.__version__}, fp32 on the CPU")
    print(f"{'largest logit':>13} {'difference':>11} {'without':>9}  family")
    wrong = []
    for case in CASES:
        largest, difference, without = compare(case)
        shown = "" if without == float("inf") else f"{without:.2g}"
        print(f"{largest:13.3f} {difference:11.2e} {shown:>9}  {case.name}")
        if difference > TOLERANCE * largest or without < 100 * TOLERANCE * largest:
            wrong.append(case.name)
    print(f"NOT THE SAME: {', '.join(wrong)}" if wrong else f"all {len(CASES)} the same")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
