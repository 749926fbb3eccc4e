"""Tokenizers of every kind, small: byte-level BPE with other rules, and the other model types.

variant_of(json, normalizer=..., pre_tokenizer=...) -> json     the same vocabulary, other rules
SPLITS["deepseek"]                                  -> pre_tokenizer of a published family
word_piece(), word_level(), unigram(), bpe()        -> json     trained on a few sentences
"""

from __future__ import annotations

import copy
import json
from typing import Any

CORPUS = [
    "the cat sat on the mat and looked at the other cat",
    "a document ends where the next one begins, does it not?",
    "numbers 0 1 2 3 4 5 6 7 8 9 and signs . , ; : ! ? ( ) [ ] < > / |",
    "unknown words are made of known pieces, and pieces of letters",
] * 20

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _split(*patterns: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*steps, byte_level(use_regex=False)]}


def byte_level(*, use_regex: bool = True, add_prefix_space: bool = False) -> dict[str, Any]:
    """Return the byte-level pre-tokenizer, by itself that of GPT-2."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


SPLITS = {
    "gpt2": byte_level(),
    "prefix": byte_level(add_prefix_space=True),
    "llama3": _split(_LLAMA3),
    "qwen": _split(_LLAMA3.replace("{1,3}", "")),
    "deepseek": _split(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
        "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    "o200k": _split(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "digits": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level()],
    },
}


def variant_of(data: bytes, **changes: Any) -> bytes:
    """Return a tokenizer.json with other top-level fields."""
    return json.dumps({**json.loads(data), **copy.deepcopy(changes)}).encode()


def added(content: str, number: int, *, special: bool = True) -> dict[str, Any]:
    """Return an entry of `added_tokens`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": special}


def unigram(*, unk: bool = True, byte_fallback: bool = False) -> bytes:
    """Return a T5-like tokenizer: `</s>` is a piece of its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    made = json.loads(tokenizer.to_str())
    model = made["model"]
    model["unk_id"] = 2 if unk else None
    model["byte_fallback"] = byte_fallback
    if byte_fallback:
        model["vocab"] += [[f"<0x{byte:02X}>", -30.0] for byte in range(256)]
    made["decoder"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    return json.dumps(made).encode()


def word_piece(*, split: str = "Whitespace") -> bytes:
    """Return a BERT-like tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = getattr(pre_tokenizers, split)()
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    made = json.loads(tokenizer.to_str())
    made["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    made["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    return json.dumps(made).encode()


def word_level() -> bytes:
    """Return a tokenizer of whole words; others are `<unk>`."""
    words = sorted({word for line in CORPUS for word in line.split()})
    vocab = {word: k for k, word in enumerate(["<unk>", "</s>", *words])}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [added("<unk>", 0), added("</s>", 1)],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        }
    ).encode()


def bpe(
    *, unk: bool = True, byte_fallback: bool = False, all_bytes: bool = True, merges: bool = True
) -> bytes:
    """Return a Llama-2-like tokenizer: characters, `\u2581` for spaces, bytes for what is unknown.

    Without `merges` it is a tokenizer of characters.
    """
    from tokenizers import Tokenizer, models, normalizers, trainers

    names = ["<unk>", "<s>", "</s>"]
    if byte_fallback:
        names += [f"<0x{byte:02X}>" for byte in range(256 if all_bytes else 200)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=len(names) + (150 if merges else 0), special_tokens=names, show_progress=False
    )
    tokenizer.train_from_iterator([word for line in CORPUS for word in line.split()], trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:3]
    made["model"] |= {"byte_fallback": byte_fallback, "fuse_unk": True}
    if not unk:
        made["model"]["unk_token"] = None
    made["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return json.dumps(made).encode()
