"""A model card that hubs can read, with our digests and no place of this machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from olm_data.mixture.lock import Lock
from olm_data.model_receipt import ModelClaim
from olm_train.extensions.hf_export.export import model_card

CLAIM = ModelClaim(
    checkpoint="c" * 64, dtype="float32", shard_bytes=5, tied_head=False, template=None, context=32
)


def card(lock: Lock | None, *, chat: bool = False, has_tokenizer: bool = True) -> str:
    job: Any = SimpleNamespace(
        claim=CLAIM,
        family=SimpleNamespace(architecture="Olmo2ForCausalLM"),
        config=SimpleNamespace(num_params=1234),
        checkpoint=SimpleNamespace(step=3),
        lock=lock,
        template="{{ messages }}" if chat else None,
        tokenizer=has_tokenizer or None,
    )
    return model_card(job).decode()


def test_the_card_names_what_the_model_was_made_of(tiny_mixture: Path) -> None:
    lock = Lock.read(tiny_mixture)
    text = card(lock, chat=True)
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "transformers"
    assert front["tags"] == ["olm-data", "conversational"]
    for digest in (CLAIM.checkpoint, lock.digest, *(each.dataset for each in lock.sources)):
        assert f"`{digest}`" in text
    assert lock.folder not in text
    assert "AutoTokenizer" in text


def test_what_there_is_not_is_not_shown() -> None:
    text = card(None, has_tokenizer=False)
    assert "mixture lock" not in text
    assert "There is no tokenizer with this model" in text
    assert yaml.safe_load(text.split("---")[1])["tags"] == ["olm-data"]
