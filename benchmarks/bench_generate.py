"""Tokens a second of generation: with a KV cache, without, and beside transformers' `generate`.

    python benchmarks/bench_generate.py [--preset olm-4m] [--prompts 16] [--new 64]

The same random weights in both programs, float32, on the CPU, greedy, prompts of unequal lengths,
as many new tokens for each. transformers pads the prompts on the left; its logits are compared with
ours before anything is timed. Rounds alternate; the best of each is told, in CPU time of a thread.
Without a cache the texts are written one by one, as all of them together would be slower still.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from olm_train.extensions.generate.engine import Engine, TextRequest
from olm_train.extensions.generate.runner import CachedRunner, WholeRunner
from olm_train.extensions.generate.sampling import Sampling
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.presets import PRESETS

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)


def transformers_model(model: Decoder, positions: int) -> Any:
    """Return a LlamaForCausalLM with the same weights; the shape has to be one of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    other = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            intermediate_size=c.feed_forward.width(c),
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_size,
            rms_norm_eps=c.norm.eps,
            rope_theta=c.positions.theta,
            max_position_embeddings=positions,
            tie_word_embeddings=c.head.tied,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
    ).eval()
    sizes = [heads * c.head_size for heads in (c.n_heads, c.kv_heads, c.kv_heads)]
    weights = {
        "model.embed_tokens.weight": model.embeddings.weight,
        "model.norm.weight": model.norm.weight,
    }
    weights["lm_head.weight"] = (model.lm_head or model.embeddings).weight
    for number, block in enumerate(model.blocks):
        at = f"model.layers.{number}."
        q, k, v = block.attention.w_qkv.weight.split(sizes)
        gate, up = block.feed_forward.w_gate_up.weight.chunk(2)
        weights |= {
            f"{at}self_attn.q_proj.weight": q,
            f"{at}self_attn.k_proj.weight": k,
            f"{at}self_attn.v_proj.weight": v,
            f"{at}self_attn.o_proj.weight": block.attention.w_out.weight,
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": block.feed_forward.w_down.weight,
            f"{at}input_layernorm.weight": block.attention_norm.weight,
            f"{at}post_attention_layernorm.weight": block.feed_forward_norm.weight,
        }
    other.load_state_dict(weights, strict=not c.head.tied)
    return other


def main() -> None:
    """Print tokens a second of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="olm-4m")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    fields = dict(PRESETS[args.preset].fields)
    attention = {**fields.get("attention", {}), "qk_norm": None}
    shape: dict[str, Any] = {**fields, "vocab_size": 4096, "attention": attention}
    shape["block"] = "pre_norm"
    model = Decoder(DecoderConfig(**shape)).eval()
    init_parameters(model, 0)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.linspace(4, args.longest, args.prompts).int().tolist()
    prompts = [torch.randint(1, 4096, (n,), generator=draw).tolist() for n in lengths]
    asked = [
        TextRequest(prompt=tuple(prompt), sampling=GREEDY, max_new_tokens=args.new)
        for prompt in prompts
    ]
    total = args.prompts * args.new
    ways: dict[str, Callable[[], Any]] = {
        "cache": lambda: Engine(CachedRunner(model, CPU)).run(asked),
        "cache, one by one": lambda: [Engine(CachedRunner(model, CPU)).run([r]) for r in asked],
        "no cache, one by one": lambda: Engine(WholeRunner(model, CPU), max_rows=1).run(asked),
    }
    try:
        other = transformers_model(model, args.longest + args.new)
    except ImportError:
        print("transformers is not installed")
    else:
        longest = max(lengths)
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        options = {"max_new_tokens": args.new, "do_sample": False, "use_cache": True}
        with torch.no_grad():
            theirs = other(torch.tensor(prompts[-1:])).logits[0, -1]
            ours = model(torch.tensor(prompts[-1:]))[0, -1]
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4)
        ways["transformers, padded"] = lambda: other.generate(
            padded, attention_mask=mask, **options
        )
        ways["transformers, one by one"] = lambda: [
            other.generate(torch.tensor([p]), **options) for p in prompts
        ]
    best = dict.fromkeys(ways, 0.0)
    for _ in range(args.rounds):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            best[name] = max(best[name], total / (time.process_time() - begin))
    print(
        f"{args.preset}, {args.prompts} prompts of 4 to {args.longest} tokens, {args.new} new each"
    )
    for name, rate in best.items():
        print(f"{name:26} {rate:9,.0f} tokens/s   {rate / best['cache']:.2f} of the cache's")


if __name__ == "__main__":
    main()
