"""The weights of one of our small models in transformers' own Llama.

Written from the names that both give their weights, and shares no code with what exports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.init import init_parameters

POSITIONS = 64
"""Tokens that both look at."""


def plain_llama(vocab_size: int, seed: int = 3) -> Decoder:
    """A model that is a Llama, of weights large enough that its choices differ."""
    config = DecoderConfig(
        vocab_size=vocab_size,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        attention={"qk_norm": None},
        feed_forward={"hidden_size": 48},
        init_std=0.2,
    )
    model = build_decoder(config, dtype=torch.float32)
    init_parameters(model, seed)
    return model.eval()


def twin(model: Decoder) -> Any:
    """The same function in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    size = c.d_model // c.n_heads
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.d_model,
        intermediate_size=c.feed_forward.hidden_size,
        num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads, rms_norm_eps=c.norm.eps, rope_theta=c.positions.theta,
        max_position_embeddings=POSITIONS, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    ours = {name: each.detach().clone() for name, each in model.state_dict().items()}
    renamed = {
        "model.embed_tokens.weight": ours["embeddings.weight"],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["lm_head.weight"],
    }
    for n in range(c.n_layers):
        a, b = f"blocks.{n}.", f"model.layers.{n}."
        kv = (c.n_kv_heads or c.n_heads) * size
        parts = ours[f"{a}attention.w_qkv.weight"].split([c.d_model, kv, kv])
        for name, part in zip("qkv", parts, strict=True):
            renamed[f"{b}self_attn.{name}_proj.weight"] = part
        gate, up = ours[f"{a}feed_forward.w_gate_up.weight"].chunk(2)
        renamed |= {
            f"{b}self_attn.o_proj.weight": ours[f"{a}attention.w_out.weight"],
            f"{b}mlp.gate_proj.weight": gate,
            f"{b}mlp.up_proj.weight": up,
            f"{b}mlp.down_proj.weight": ours[f"{a}feed_forward.w_down.weight"],
            f"{b}input_layernorm.weight": ours[f"{a}attention_norm.weight"],
            f"{b}post_attention_layernorm.weight": ours[f"{a}feed_forward_norm.weight"],
        }
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(renamed, strict=True)
    return theirs.eval()


def save_both(folder: Path, tokenizer: Path) -> tuple[Path, Path]:
    """Save a model and its twin with the tokenizer, whose id 0 ends a document; return both."""
    from transformers import PreTrainedTokenizerFast

    read = Tokenizer.from_file(str(tokenizer))
    model = plain_llama(read.get_vocab_size())
    model.save(folder / "ours", read)
    twin(model).save_pretrained(folder / "theirs")
    end = read.id_to_token(0)
    fast = PreTrainedTokenizerFast(tokenizer_object=read, eos_token=end)
    fast.save_pretrained(folder / "theirs")
    return folder / "ours", folder / "theirs"
