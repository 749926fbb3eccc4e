"""A small Llama of transformers with tokenizer and chat template, saved by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.hf_models import hf_model
from support.small_tokenizer import train
from tokenizers import Tokenizer, processors

POSITIONS = 64
TEMPLATE = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools is not none %}{{- raise_exception('no tools') }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def save_hf_talker(folder: Path, *, begin: bool = True, **fields: Any) -> Path:
    """Save model and tokenizer to a folder, and return it.

    Args:
        begin: the tokenizer puts `<s>` before each text.
        fields: of the model's configuration.
    """
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(train(folder / "plain.json")))
    (folder / "plain.json").unlink()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    given = {"max_position_embeddings": POSITIONS, "eos_token_id": 0, **fields}
    hf_model("llama", vocab_size=tokenizer.get_vocab_size(), **given).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|endoftext|>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def theirs(folder: Path) -> tuple[Any, Any]:
    """Return model, in fp32, and tokenizer as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def greedy(folder: Path, ids: list[int], most: int) -> list[int]:
    """Return the ids that transformers' `generate` writes after others, without those that end."""
    model, _ = theirs(folder)
    given = torch.tensor([ids])
    found = model.generate(given, max_new_tokens=most, do_sample=False, pad_token_id=0)
    ends = model.generation_config.eos_token_id
    new: list[int] = found[0, len(ids) :].tolist()
    return new[:-1] if new[-1] in (ends if isinstance(ends, list) else [ends]) else new
