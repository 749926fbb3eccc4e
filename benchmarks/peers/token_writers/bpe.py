"""A byte-level BPE tokenizer.json as a `tiktoken.Encoding`, which is faster on one thread.

nanoGPT and litdata's users take tiktoken for GPT-2's vocabulary. It ranks merges by id, so this
holds where merges were numbered in order, as in GPT-2's and cl100k's files; the comparison of ids
shows where not.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_of_character() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + k): b for k, b in enumerate(hidden)}


def pattern(pre_tokenizer: dict[str, Any]) -> str:
    """Return the pre-tokenizer's regular expression.

    Raises:
        ValueError: it is not byte-level BPE with one pattern.
    """
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    for step in steps:
        if step["type"] == "Split" and "Regex" in step["pattern"]:
            return str(step["pattern"]["Regex"])
    if [step["type"] for step in steps] == ["ByteLevel"] and not steps[0]["add_prefix_space"]:
        return BYTE_LEVEL
    raise ValueError("tiktoken cannot stand in for this pre-tokenizer")


@lru_cache(maxsize=1)
def tiktoken_encoding(path: str) -> Any:
    """Return a tiktoken.Encoding with the ids of the tokenizer.json at `path`.

    Raises:
        ValueError: the file is not byte-level BPE without a normalizer.
    """
    import tiktoken

    model = json.loads(Path(path).read_text())
    if model.get("normalizer"):
        raise ValueError("tiktoken has no normalizer")
    value = byte_of_character()
    special = {t["content"]: t["id"] for t in model.get("added_tokens", []) if t["special"]}
    ranks = {
        bytes(value[c] for c in token): rank
        for token, rank in model["model"]["vocab"].items()
        if token not in special
    }
    return tiktoken.Encoding(
        "peer",
        pat_str=pattern(model["pre_tokenizer"]),
        mergeable_ranks=ranks,
        special_tokens=special,
    )
