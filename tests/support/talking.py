"""A small model with a tokenizer, saved to a folder, that writes text without any training."""

from __future__ import annotations

from pathlib import Path

from support.model_options import CONFIG, stirred
from support.small_tokenizer import train
from tokenizers import Tokenizer

POSITIONS = 96
"""Tokens it looks at."""


def save_talker(folder: Path) -> Path:
    """Save the model to a folder and return it; ids below 300, 0 ends a document."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = {"positions": {"name": "learned", "max_positions": POSITIONS}, "init_std": 0.3}
    model = stirred(CONFIG.changed(vocab_size=300, **shape))  # type: ignore[arg-type]
    model.save(folder / "model", Tokenizer.from_file(str(train(folder / "tokenizer.json"))))
    return folder / "model"
