"""What describes an exported model is read as it was written, and nothing else is taken for it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from olm_data.errors import ValidationError
from olm_data.model_folder import CONFIG, ExportedFile, FolderConfig, read_about
from olm_data.model_receipt import FileProof, ModelClaim, ModelReceipt, Verified
from olm_data.storage.store import Store

WEIGHTS = ExportedFile(file="model.safetensors", bytes=3, sha256="a" * 64)


ABOUT = FolderConfig(model={"d_model": 8}, parameters=7, weights=WEIGHTS)


def put(folder: Path, **changes: object) -> Store:
    about = {**msgspec.to_builtins(ABOUT), **changes}
    (folder / CONFIG).write_text(json.dumps(about))
    return Store(str(folder))


def test_it_names_all_files_but_itself(tmp_path: Path) -> None:
    about = read_about(put(tmp_path))
    assert (about, about.files) == (ABOUT, (WEIGHTS,))


@pytest.mark.parametrize("changes", [{"format": "hf"}, {"version": 9}, {"weights": None}])
def test_anything_else_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        read_about(put(tmp_path, **changes))


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
def test_anything_else_is_no_receipt(data: bytes) -> None:
    with pytest.raises(ValidationError, match="not the receipt of an export"):
        ModelReceipt.decode(data, "here")
