"""Ids and trained tokens are those of `renderers`, which writes out the templates of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from olm_data.dataset.inputs import ChatOptions
from olm_data.extensions.chat.conversations import Refused, conversation
from olm_data.extensions.chat.encoder import ChatEncoder
from olm_data.tokenizer.tokenizer import spec_from_bytes

QWEN = "<|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <tool_response>"
QWEN += " </tool_response> <think> </think> <|vision_start|> <|vision_end|> <|image_pad|>"
QWEN += " <|video_pad|> <s> </s>"
LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
LLAMA += " <|eom_id|> <|python_tag|>"
DEEPSEEK = "<|begin▁of▁sentence|> <|end▁of▁sentence|> <|User|> <|Assistant|> <think> </think>"
DEEPSEEK += " <|tool▁calls▁begin|> <|tool▁calls▁end|> <|tool▁call▁begin|> <|tool▁call▁end|>"
DEEPSEEK += " <|tool▁sep|> <|tool▁outputs▁begin|> <|tool▁outputs▁end|> <|tool▁output▁begin|>"
DEEPSEEK += " <|tool▁output▁end|>"
DEEPSEEK = DEEPSEEK.replace("|", "\uff5c")
GEMMA = "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call>"
GEMMA += ' <tool_call|> <|tool_response> <tool_response|> <|"|> <|image> <image|> <|image|>'
GEMMA += " <|audio> <|audio|> <audio|> <|video|>"
GLM = "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|> <think>"
GLM += " </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>"
GLM += " <tool_response> </tool_response> /nothink"
WORDS = (  # line breaks are cut from words as these models do it
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "the fox"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "so on, é 世界"},
]
THOUGHT = [*TALK[:3], {"role": "assistant", "reasoning_content": "let me see", "content": "so"}]
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [
    TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"},
    {"role": "assistant", "content": "it is 2"},
]
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
LOST = [("Llama3", THOUGHT), ("Qwen3VL", THOUGHT)]
LOST += [(name, m) for name in ("DeepSeekV3", "DeepSeekR1", "Gemma4") for m in (THOUGHT, TOOLS)]
"""Templates that leave out thoughts, or a call, or take its arguments as text alone."""
SYSTEM = [{"role": "system", "content": "Be brief."}, *TALK]


def both(renderer: str, template: str, special: str, messages: list[Any]) -> tuple[Any, ...]:
    """Return our ids and trained tokens, theirs, and the text of ids."""
    renderers, trl = pytest.importorskip("renderers"), pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    text = (Path(trl.__file__).parent / "chat_templates" / template).read_text()
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user assistant the fox, and so on.\n\n"] * 9, trainer)
    names = special.split()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in names])
    spec = spec_from_bytes(tokenizer.to_str().encode(), name="test", eos=names[1])
    tokens = {"bos_token": names[0], "eos_token": names[1]}
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    hf.chat_template = text
    tools = [{"type": "function", "function": ADD}] if messages is TOOLS else None
    theirs = getattr(renderers, renderer + "Renderer")(hf).render(messages, tools=tools)
    options = ChatOptions(
        template=text,
        special=tokens,
        train="assistant",
        thinking="keep",
        ends="turn",
        max_tokens=None,
        too_long="drop",
    )
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    ours = ChatEncoder(spec, options)._fitting(conversation(row, "messages"), "here")
    return ours.ids, ours.trained, theirs.token_ids, np.array(theirs.sampled_mask), spec.decode


@pytest.mark.parametrize("messages", [TALK, SYSTEM, THOUGHT, TOOLS])
@pytest.mark.parametrize(
    ("renderer", "template", "special"),
    [
        ("Qwen3", "qwen3.jinja", QWEN),
        ("Qwen3VL", "qwen3_vl.jinja", QWEN),
        ("Llama3", "llama3_2.jinja", LLAMA),
        ("DeepSeekV3", "deepseekv3.jinja", DEEPSEEK),
        ("DeepSeekR1", "deepseek_r1_distill.jinja", DEEPSEEK),
        ("Gemma4", "gemma4.jinja", GEMMA),
    ],
)
def test_ids_and_trained_tokens_are_those_of_renderers(
    renderer: str, template: str, special: str, messages: list[Any]
) -> None:
    if (renderer, messages) in LOST:
        with pytest.raises(Refused) as error:
            both(renderer, template, special, messages)
        assert error.value.reason == "template"
        return
    ids, trained, their_ids, sampled, _ = both(renderer, template, special, messages)
    assert ids.tolist() == their_ids
    assert trained.tolist() == sampled.tolist()


@pytest.mark.parametrize("messages", [TALK, SYSTEM, THOUGHT, TOOLS])
@pytest.mark.parametrize(
    ("renderer", "template"),
    [
        ("Qwen35", "qwen3_5_think.jinja"),
        ("Qwen36", "qwen3_6.jinja"),
        ("Qwen38", "qwen3_8.jinja"),
        ("Nemotron3", "nemotron_3_nano.jinja"),
    ],
)
def test_what_the_prompt_for_an_answer_already_holds_is_not_trained(
    renderer: str, template: str, messages: list[Any]
) -> None:
    ids, trained, their_ids, sampled, decode = both(renderer, template, QWEN, messages)
    assert ids.tolist() == their_ids
    assert not (trained & ~sampled).any()
    only_theirs = np.diff(sampled & ~trained, prepend=False, append=False)
    edges = np.flatnonzero(only_theirs).reshape(-1, 2)
    assert len(edges) > 0
    assert {decode(ids[a:b]) for a, b in edges} <= {"<think>", "<think>\n"}


def test_a_template_whose_answers_end_in_the_next_message_is_refused() -> None:
    with pytest.raises(Refused, match="no token ends message 3"):
        both("GLM45", "glm4moe.jinja", GLM, TALK)
