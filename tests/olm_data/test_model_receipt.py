"""The receipt is read as it was written, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest

from olm_data.errors import ValidationError
from olm_data.model_receipt import FileProof, ModelClaim, ModelReceipt, Verified

CLAIM = ModelClaim(
    checkpoint="c" * 64, dtype="bfloat16", shard_bytes=5, tied_head=False, template=None, context=32
)
RECEIPT = ModelReceipt(
    claim=CLAIM,
    model_class="LlamaForCausalLM",
    parameters=7,
    step=3,
    lock="",
    datasets={},
    tokenizer=None,
    probe=None,
    files={"config.json": FileProof(3, "a" * 64)},
    tensors={"w": "b" * 64},
    verified=Verified(
        tensors_read_by="safetensors 1", tokenizer_read_by=(), model=None, not_compared=("all",)
    ),
)


def test_a_receipt_comes_back() -> None:
    assert ModelReceipt.decode(RECEIPT.encode(), "here") == RECEIPT
    assert json.loads(CLAIM.encode())["format"] == "hf"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", RECEIPT.encode().replace(b'"version": 1', b'"version": 2')]
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValidationError, match="not the receipt of an export"):
        ModelReceipt.decode(data, "here")
