"""A back-end that cannot run here says why, before anything is computed."""

from __future__ import annotations

import pytest
import torch
from support.attention_loop import ROWS
from support.batches import make_batch

from olm_data.errors import UsageError
from olm_train.model.attention import attention_backend
from olm_train.model.attention_backend import Use
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "use", "why"),
    [
        ("varlen", Use(CPU, torch.bfloat16, 64, False), "need a CUDA device"),
        ("varlen", Use(CUDA, torch.float32, 64, True), "16 bits, not in float32"),
        ("varlen", Use(CUDA, torch.bfloat16, 320, True), "up to 256"),
        ("varlen", Use(CUDA, torch.bfloat16, 20, True), "multiples of 8"),
        ("varlen", Use(CUDA, torch.bfloat16, 64, True, True), "no soft cap"),
        ("flex", Use(CPU, torch.float32, 64, True), "no backward pass on cpu"),
    ],
)
def test_a_backend_that_cannot_run_says_why(name: str, use: Use, why: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot run here") as refusal:
        attention_backend(name).require(name, use)
    assert why in str(refusal.value.why)
    assert refusal.value.fix


def test_a_decoder_refuses_before_it_computes_and_takes_no_other_backend() -> None:
    config = DecoderConfig(
        vocab_size=64, d_model=32, n_layers=1, n_heads=4, attention={"backend": "varlen"}
    )
    model = Decoder(config)
    with pytest.raises(UsageError, match="varlen cannot run here"):
        model(make_batch(ROWS, vocab_size=64).input_ids)
