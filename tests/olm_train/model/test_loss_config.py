"""Which loss is chosen, and which options it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.training import MODEL

from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.loss_config import LossChoice, LossConfig


def test_auto_takes_chunks_where_the_logits_would_not_fit() -> None:
    model = DecoderConfig(vocab_size=100_000, d_model=64, n_layers=1, n_heads=1)

    def chosen(microbatch: int, compiling: bool = False, **options: Any) -> LossChoice:
        return LossConfig(**options).choose(model, microbatch=microbatch, compiling=compiling)

    assert chosen(8192).name == "plain"
    assert chosen(8192).chunk_size is None
    assert chosen(8192, compiling=True).name == "compiled"
    large = chosen(16384)  # 100,000 x 16,384 x 10 bytes = 16.4 GB
    assert (large.name, large.chunk_size) == ("chunked", 4096)
    assert large.why == "logits of a micro-batch need 16.4 GB > max_logits_gb 16"
    assert chosen(16384, chunk_size=1024).chunk_size == 1024
    assert chosen(16384, max_logits_gb=20.0).name == "plain"
    assert chosen(8192, max_logits_gb=1.0).name == "chunked"
    assert chosen(16384, name="plain").name == "plain"
    assert not chosen(16384, name="chunked").compiled
    assert chosen(16384, True, name="chunked").compiled


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": "chunky"}, "did you mean 'chunked'"),
        ({"name": "plain", "chunk_size": 8}, "has no chunks"),
        ({"name": "chunked", "max_logits_gb": 1.0}, "no effect without name: auto"),
        ({"z_loss_multiplier": 0.0}, "z_loss_multiplier is above 0, not 0.0"),
        ({"name": "linear_cross_entropy", "z_loss_multiplier": 1.0}, "linear_cross_entropy"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LossConfig(**options)


def test_linear_cross_entropy_is_refused_for_a_soft_cap_and_for_pads() -> None:
    config = LossConfig(name="linear_cross_entropy")
    for model in (MODEL.changed(head={"softcap": 5.0}), replace(MODEL, vocab_multiple=128)):
        with pytest.raises(UsageError, match=r"head\.softcap and no padded"):
            config.choose(model, microbatch=8, compiling=False)
