"""Small models of transformers as files that stay: `python tests/support/frozen_hf_models.py NAME`.

A folder each under tests/olm_train/extensions/hf/frozen: config.json and model.safetensors (bf16)
as transformers writes them, and expected.json: a prompt and the logits that transformers gives it
in fp32. Made once; made anew only where a family gets another model, never to please a test.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
FROZEN = HERE.parent / "olm_train/extensions/hf/frozen"

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SMALL_GPT2: dict[str, Any] = {
    "vocab_size": 32, "n_embd": 16, "n_inner": 24, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "llama": "llama llama3",
    "qwen2": "qwen2 windows of late layers",
    "qwen3": "qwen3 windows",
    "mistral": "mistral",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo3 yarn",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gpt2": "gpt2",
    "olmoe": "olmoe",
    "qwen3_moe": "qwen3_moe",
}
"""Folder -> its model in `hf_models.py`."""
TOKENS = 24


def main(names: list[str]) -> None:
    """Write folders."""
    import torch
    import transformers
    from support.hf_models import hf_model

    for seed, (folder, name) in enumerate(MODELS.items()):
        if folder not in names:
            continue
        shutil.rmtree(FROZEN / folder, ignore_errors=True)
        changes = dict(SMALL_GPT2 if folder == "gpt2" else SMALL)
        if folder in ("qwen3", "mistral", "gemma2", "gemma3", "qwen3_moe"):
            changes["head_dim"] = 8
        if folder in ("olmoe", "qwen3_moe"):
            changes |= {"num_hidden_layers": 2, "num_experts": 4, "intermediate_size": 16}
        if folder == "gemma3":
            changes["num_hidden_layers"] = 3
        model = hf_model(name, seed=seed, **changes).to(torch.bfloat16)
        model.save_pretrained(FROZEN / folder)
        (FROZEN / folder / "generation_config.json").unlink(missing_ok=True)
        ids = torch.randint(32, (TOKENS,), generator=torch.Generator().manual_seed(seed))
        again = type(model).from_pretrained(  # .float() would leave its buffers rounded to bf16
            FROZEN / folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            logits = again.eval()(ids[None]).logits[0]
        expected = {
            "transformers": transformers.__version__,
            "ids": ids.tolist(),
            "logits": [[round(value, 6) for value in row] for row in logits.tolist()],
        }
        (FROZEN / folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
